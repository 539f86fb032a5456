"""What an attention is, as a picture for a notebook: HTML in one piece, readable on light and on dark paper.

Text has the colour of the page around it, and lines a part of it; only heads and masks have colours of their own.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mhsa_compile.errors import MhsaError
from mhsa_compile.spec.field_notes import fields_with_notes

if TYPE_CHECKING:
    from mhsa_compile.spec.attention_spec import AttentionSpec

TableRows = Iterable[tuple[str, str]]

_CELLS = 12  # of the mask on each side
_FEW = 3  # cells that stand for a window
_MOST_STRIPES = 64  # beyond that they are too thin to see
_TOKENS = 128  # that FLOPs are counted for
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STYLE = "font:13px/1.5 system-ui,sans-serif;max-width:680px;color:inherit"
_FRAME = 'fill="none" stroke="currentColor" stroke-opacity=".45"'


def picture_of(title: str, spec: AttentionSpec, *, projections: bool = True, more: TableRows = ()) -> str:
    """HTML: a drawing from x to y, and what there is to say, with `more` at its end."""
    return card(title, (*_features(spec, projections), *more), _drawing(spec, projections))


def card(title: str, rows: TableRows, drawing: str = "") -> str:
    """HTML of a title, a drawing and rows of a name and a text each."""
    terms = "".join(
        f'<div style="opacity:.7">{html.escape(name)}</div>'
        f'<div style="overflow-wrap:anywhere">{html.escape(text)}</div>'
        for name, text in rows
    )
    grid = f'<div style="display:grid;grid-template-columns:max-content 1fr;gap:0 14px">{terms}</div>'
    return f'<div style="{_STYLE}"><div style="font-weight:600">{html.escape(title)}</div>{drawing}{grid}</div>'


def parameters_of(spec: AttentionSpec) -> int:
    """How many numbers a spec's module holds: its projections, and what its fields take beside them."""
    queries, joined = spec.num_heads * spec.head_dim, spec.num_heads * spec.v_head_dim
    shared = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    weights = spec.embed_dim * (queries + joined) + spec.source_dim * shared
    biases = queries + shared + spec.embed_dim if spec.bias else 0
    fields = fields_with_notes(type(spec)).items()
    more = (field.note.parameters for name, field in fields if field.note.parameters and getattr(spec, name))
    return weights + biases + sum(int(getattr(spec, name)) for name in more)


def shortened(number: float) -> str:
    """A number in three digits, with a letter for thousands, millions, and so on.

    >>> shortened(1_050_624), shortened(980)
    ('1.05 M', '980')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _features(spec: AttentionSpec, projections: bool) -> TableRows:
    """What a person would ask first, and of the rest what is not as usual."""
    heads = f"{spec.num_heads} of {spec.head_dim} dims"
    if spec.num_kv_heads != spec.num_heads:
        heads += f", {spec.num_kv_heads} of keys and values: {spec.num_heads // spec.num_kv_heads} heads share each"
    if spec.v_head_dim != spec.head_dim:
        heads += f"; values have {spec.v_head_dim} dims"
    yield "heads", heads
    yield "sees", "; ".join(_visible_keys(spec))
    for row in ("positions", "scores"):
        if words := _words(spec, row):
            yield row, "; ".join(words)
    if spec.kv_cache:
        stored = "" if spec.cache_dtype == spec.dtype else f", of {spec.cache_dtype}"
        yield "cache", f"calls write into one{stored}, and see those before"
    if spec.outputs != ("y",):
        yield "returns", ", ".join(spec.outputs)
    if projections:
        count = parameters_of(spec)
        size = shortened(count * _BYTES[spec.dtype])
        yield "parameters", f"{shortened(count)}, {size}B of {spec.dtype}{'' if spec.bias else ', without biases'}"
    sizes = 1, _TOKENS, _TOKENS
    flops = [f"{shortened(spec.projection_flops(*sizes))} in projections"] if projections else []
    if not spec.needs_lengths:  # which may be others
        flops.append(f"{shortened(spec.attention_flops(*sizes))} in attention")
    if flops:
        yield f"FLOPs, {_TOKENS} tokens", ", ".join(flops)


def _visible_keys(spec: AttentionSpec) -> list[str]:
    return _words(spec, "sees") or ["all keys"]


def _words(spec: AttentionSpec, row: str) -> list[str]:
    """What the fields that are set say in a row."""
    values = [(getattr(spec, name), field.note) for name, field in fields_with_notes(type(spec)).items()]
    phrases = [
        (note.turn, note.in_words(value)) for value, note in values if note.row == row and value not in (None, False)
    ]
    return [words for _, words in sorted(phrases, key=lambda one: one[0])]


def _drawing(spec: AttentionSpec, projections: bool) -> str:
    """SVG: x, the heads of queries, keys and values, who sees whom, the heads' results, y."""
    H, G = spec.num_heads, spec.num_kv_heads
    parts = []
    for row, (name, heads) in enumerate((("q", H), ("k", G), ("v", G))):
        y = 16 + 52 * row
        parts.append(_stripes(130, y, heads, H // heads))
        parts.append(_text(120, y + 22, name, "end"))
        source = 48 if row == 0 or not spec.is_cross else 126
        if projections:
            parts.append(_line(38, source + 28, 104, y + 18))
    parts += [
        _line(254, 34, 300, 60),
        _line(254, 86, 300, 80),
        _line(254, 138, 290, 162, 410, 162, 446, 106),
        _line(404, 86, 446, 86),
    ]
    parts += [_mask(spec, 304, 36), _stripes(450, 68, H, 1), _text(510, 122, "heads", "middle")]
    if projections:
        parts += [_box(24, 48, 14, 56), _text(31, 40, "x", "middle"), _text(31, 120, str(spec.embed_dim), "middle")]
        if spec.is_cross:
            parts[-1] = _text(46, 44, str(spec.embed_dim), "start")
            parts += [_box(24, 126, 14, 40), _text(31, 120, "context", "middle")]
            parts.append(_text(31, 180, str(spec.kv_embed_dim), "middle"))
        parts += [_line(574, 86, 620, 86), _box(624, 58, 14, 56), _text(631, 50, "y", "middle")]
        parts.append(_text(631, 130, str(spec.embed_dim), "middle"))
    label = html.escape(f"{H} heads, {'; '.join(_visible_keys(spec))}", quote=True)
    return (
        f'<svg viewBox="0 0 660 186" role="img" aria-label="{label}" style="width:100%;height:auto;display:block" '
        f'font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    )


def _stripes(x: float, y: float, heads: int, each: int) -> str:
    """A box of 120 x 36 with a stripe a head; heads that share keys and values have a colour in common."""
    stripe_count = min(heads, _MOST_STRIPES)
    width = 120 / stripe_count
    gap = 1 if width > 3 else 0
    stripes = "".join(
        f'<rect x="{x + i * width:.2f}" y="{y}" width="{width - gap:.2f}" height="36" rx="{min(2, width / 4):.1f}" '
        f'fill="hsl({_hue(i * heads // stripe_count, heads)},55%,55%)"/>'
        for i in range(stripe_count)
    )
    count = f"{heads} head{'s' if heads > 1 else ''}" + (f", each for {each}" if each > 1 else "")
    return f"<g><title>{count}</title>{stripes}</g>"


def _hue(index: int, count: int) -> int:
    return 205 + round(140 * index / count)


def _mask(spec: AttentionSpec, x: float, y: float) -> str:
    """Who sees whom among a few tokens: a row looks, a column is looked at. Windows are drawn shorter than they are."""
    side = 100 / _CELLS
    cells = "".join(
        f'<rect x="{x + j * side:.2f}" y="{y + i * side:.2f}" width="{side - 1:.2f}" height="{side - 1:.2f}"/>'
        for i, row in enumerate(_sketch(spec))
        for j, visible in enumerate(row)
        if visible
    )
    mark = "" if spec.mask is None else _text(x + 50, y + 116, "and the call's mask", "middle")
    frame = f'<rect x="{x - 1}" y="{y - 1}" width="101" height="101" {_FRAME}/>'
    return f'{frame}<g fill="hsl(205,60%,52%)"><title>who sees whom</title>{cells}</g>{mark}'


def _sketch(spec: AttentionSpec) -> Sequence[Sequence[bool]]:
    left, right = spec.sides
    visible = [
        [(left < 0 or i - j <= min(left, _FEW)) and (right < 0 or j - i <= min(right, _FEW)) for j in range(_CELLS)]
        for i in range(_CELLS)
    ]
    try:
        constant = spec.constant_pairs(_CELLS, _CELLS)
    except MhsaError:
        constant = None  # it fits no such lengths; the words below name it
    if constant is None:
        return visible
    return [[one and bool(constant[i, j]) for j, one in enumerate(row)] for i, row in enumerate(visible)]


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" {_FRAME}/>'


def _line(*places: float) -> str:
    """SVG: a line through the points x, y, x, y, ..."""
    return f'<polyline points="{" ".join(map(str, places))}" {_FRAME}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'
