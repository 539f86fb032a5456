"""Resize to sizes that the graph computes, element by element, as ONNX writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.relax.sizes.size_values import emitted, literal, number


def resize(bb: Any, data: Any, shape: Sequence[Any], scales: Sequence[Any] | None, attributes: dict[str, Any]) -> Any:
    """`data` at the dims `shape`. `scales`: what each axis is multiplied by, of the dims themselves where None.

    Raises ModelError for what has no meaning here.
    """
    words = {name: _word(attributes.get(name), default) for name, default in _DEFAULTS.items()}
    node = f"Resize node {attributes['tvm_custom']['name']!r}"
    for name, choices in _KNOWN.items():
        if words[name] not in choices:
            hint = "Fix free sizes with dims, or export another mode."
            raise ModelError(node, f"{name} of {', '.join(choices)}, where sizes are computed", words[name], hint)
    if attributes.get("exclude_outside", 0):
        raise ModelError(node, "exclude_outside=0, where sizes are computed", "1", "Fix free sizes with dims.")
    kind = str(data.ty.dtype)
    wide = kind if kind == "float64" else "float32"
    own = list(data.ty.shape.values)
    changed = [
        axis
        for axis, (size, whole) in enumerate(zip(own, shape, strict=True))
        if not (size.same_as(whole) or (number(size) is not None and number(size) == number(whole)))
        or (scales is not None and number(scales[axis]) not in (1, None))
    ]
    cubic = attributes.get("cubic_coeff_a", -0.75)

    def compute(data: Any, shape: list[Any], scales: list[Any] | None) -> Any:
        def element(*at: Any) -> Any:
            def value(places: list[Any], axes: list[int]) -> Any:
                if not axes:
                    return data[tuple(places)].astype(wide)
                axis, rest = axes[0], axes[1:]
                size = data.shape[axis]
                scale = None if scales is None else scales[axis]
                x = _source(at[axis], size, shape[axis], scale, words["coordinate_transformation_mode"])
                total: Any = None
                for place, weight in _taps(x, words, cubic):
                    inner = value(
                        [*places[:axis], _clamp(place, size), *places[axis + 1 :]],
                        rest,
                    )
                    term = inner if weight is None else inner * weight.astype(wide)
                    total = term if total is None else total + term
                return total

            result = value(list(at), changed)
            if kind.startswith(("float", "bfloat")) or words["mode"] == "nearest":
                return result.astype(kind)
            return tirx.round(result).astype(kind)

        return te.compute(tuple(shape), element, "resize")

    return emitted(bb, compute, data, list(shape), None if scales is None else list(scales), name="resize")


_DEFAULTS = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"}
_KNOWN = {
    "mode": ("nearest", "linear", "cubic"),
    "coordinate_transformation_mode": (
        "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
}  # fmt: skip


def _word(value: Any, default: str) -> str:
    return default if value is None else value.decode() if isinstance(value, bytes) else str(value)


def _clamp(place: Any, size: Any) -> Any:
    return tirx.max(tirx.min(place, size - 1), literal(0))


def _source(i: Any, size: Any, whole: Any, scale: Any, mode: str) -> Any:
    """Where output element i lies in the input: a float32, as ONNX Runtime computes it."""
    x, half, one = i.astype("float32"), tirx.const(0.5, "float32"), tirx.const(1.0, "float32")
    own, full = size.astype("float32"), whole.astype("float32")
    factor = full / own if scale is None else scale.astype("float32")
    if mode == "align_corners":
        steps = tirx.max(full - one, one)
        return tirx.Select(whole > 1, x * (own - one) / steps, tirx.const(0.0, "float32"))
    if mode == "asymmetric":
        return x / factor
    plain = (x + half) / factor - half
    if mode == "pytorch_half_pixel":
        return tirx.Select(whole > 1, plain, tirx.const(0.0, "float32"))
    if mode == "half_pixel_symmetric":
        adjustment = full / (factor * own)
        return own / tirx.const(2.0, "float32") * (one - adjustment) + plain
    return plain


def _taps(x: Any, words: dict[str, str], a: float) -> list[tuple[Any, Any]]:
    """(an input element, its weight), those that make up the value at x; a weight of None is 1."""
    if words["mode"] == "nearest":
        half = tirx.const(0.5, "float32")
        rounded = {
            "round_prefer_floor": lambda: tirx.ceil(x - half),
            "round_prefer_ceil": lambda: tirx.floor(x + half),
            "floor": lambda: tirx.floor(x),
            "ceil": lambda: tirx.ceil(x),
        }[words["nearest_mode"]]()
        return [(rounded.astype("int64"), None)]
    low = tirx.floor(x)
    first, t, one = low.astype("int64"), x - low, tirx.const(1.0, "float32")
    if words["mode"] == "linear":
        return [(first, one - t), (first + 1, t)]
    c = tirx.const(a, "float32")
    two, three, four, five, eight = (tirx.const(float(n), "float32") for n in (2, 3, 4, 5, 8))

    def near(d: Any) -> Any:
        return ((c + two) * d - (c + three)) * d * d + one

    def far(d: Any) -> Any:
        return ((c * d - five * c) * d + eight * c) * d - four * c

    return [
        (first - 1, far(t + one)),
        (first, near(t)),
        (first + 1, near(one - t)),
        (first + 2, far(two - t)),
    ]
