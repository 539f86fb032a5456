"""Dims of a signature: a size, the name of one, or an expression of names, such as "P + S"."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int | None:
    """The size of a dim where the symbols have `sizes`; None where one of them has none."""
    if isinstance(dim, int):
        return dim
    size = sizes.get(dim)
    return value_of(dim, sizes) if size is None else size


def value_of(dim: str, sizes: Mapping[str, int]) -> int | None:
    """What the symbols make of an expression; None for a plain symbol."""
    tree = _expression(dim)
    return None if tree is None else _value(tree, sizes)


def with_sizes(dim: str, sizes: Mapping[str, int]) -> int | str:
    """A dim with these sizes in the places of their symbols: a size where none is left."""
    size = size_of(dim, sizes)
    if size is not None:
        return size
    return " ".join(str(sizes.get(word, word)) for word in dim.split()) if is_expression(dim) else dim


def names_of(dim: str) -> set[str]:
    """The symbols of an expression; none of what is no expression."""
    tree = _expression(dim)
    return set() if tree is None else {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def is_expression(dim: int | str) -> bool:
    """Whether a dim is made of other symbols."""
    return isinstance(dim, str) and _expression(dim) is not None


@functools.cache
def _expression(dim: str) -> ast.BinOp | None:
    """The syntax tree of an expression; None for a symbol, also for one with a name that is none of Python's."""
    try:
        tree = ast.parse(dim, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last is how the parser says "too deep"
        return None
    return tree if isinstance(tree, ast.BinOp) and _is_known(tree) else None


def _is_known(tree: ast.expr) -> bool:
    if isinstance(tree, ast.BinOp):
        return type(tree.op) in _OPERATORS and _is_known(tree.left) and _is_known(tree.right)
    return isinstance(tree, ast.Name) or (isinstance(tree, ast.Constant) and type(tree.value) is int)


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int | None:
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, sizes), _value(tree.right, sizes)
        divides_by_zero = isinstance(tree.op, ast.FloorDiv) and right == 0
        return None if left is None or right is None or divides_by_zero else _OPERATORS[type(tree.op)](left, right)
    if isinstance(tree, ast.Name):
        return sizes.get(tree.id)
    assert isinstance(tree, ast.Constant)
    return int(tree.value)  # type: ignore[arg-type]
