"""GridSample by lines: places and weights of each sample's four neighbours are computed once, whatever the number of
channels, and samples are sums of rows of channels.

Notation: B batch, C channels, H and W the picture's sizes, P samples.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.sizes.call_checks import OPAQUE
from mhsa_compile.frontend.relax.values import dims, text_of

_FEWEST_CHANNELS = 4


def grid_sample(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """x (B, C, H, W), grid (B, P..., 2) -> (B, C, P...); None for other modes, and for few channels."""
    x, grid = inputs
    if any(not isinstance(getattr(value.ty, "shape", None), relax.ShapeExpr) for value in inputs):
        return None
    mode, padding = (text_of(attributes.get(*pair)) for pair in (("mode", "linear"), ("padding_mode", "zeros")))
    if mode not in ("linear", "bilinear") or padding not in ("zeros", "border"):
        return None
    is_picture = x.ty.ndim == 4 and {str(x.ty.dtype), str(grid.ty.dtype)} == {"float32"}
    channels = dims(x)[1] if is_picture else None
    if not isinstance(channels, int | tirx.IntImm) or int(channels) < _FEWEST_CHANNELS:
        return None
    batch, _, height, width = dims(x)
    _, rows, columns, _ = dims(grid)
    rest = [batch, rows, columns]
    aligned = bool(attributes.get("align_corners", 0))
    points = _points(_sizes(dims(x)), _sizes([*rest, 2]), aligned, padding == "zeros")
    types = [relax.TensorType([*rest, 4], dtype) for dtype in ("int64", "float32")]
    pairs = bb.emit(relax.call_tir(bb.add_func(points, "grid_points"), [x, grid], types))
    places, weights = (bb.emit(relax.TupleGetItem(pairs, i)) for i in range(2))
    last = bb.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
    pixels = bb.emit(relax.op.reshape(last, relax.ShapeExpr([batch, height * width, channels])))
    samples = _samples(_sizes([*rest, 4]), _sizes([batch, height * width, channels]))
    kind = relax.TensorType([*rest, channels], "float32")
    y = bb.emit(relax.call_tir(bb.add_func(samples, "grid_samples"), [pixels, places, weights], kind))
    return bb.normalize(relax.op.permute_dims(y, [0, 3, 1, 2]))


def _sizes(shape: list[Any]) -> list[Any]:
    """Those of a function of its own: sizes that are no numbers are variables."""
    return [_integer(dim) if isinstance(dim, int | tirx.IntImm) else tirx.Var("size", "int64") for dim in shape]


def _integer(value: Any) -> Any:
    return tirx.IntImm("int64", int(value))


def _points(picture: list[Any], shape: list[Any], aligned: bool, zeros: bool) -> Any:
    """x, grid -> each neighbour's place among all pixels, -1 where it lies outside and is 0, and its weight. Of x the
    sizes alone are read."""
    x = te.placeholder(picture, "float32", "x")
    _, _, height, width = picture
    grid = te.placeholder(shape, "float32", "grid")

    def number(value: float) -> Any:
        return tirx.const(value, "float32")

    def coordinate(at: Any, axis: int, size: Any) -> Any:
        """In pixels, at most two outside. NaN is brought to an end, too."""
        whole, along = size.astype("float32"), grid(*at, _integer(axis)) + number(1)
        pixel = along / number(2) * (whole - number(1)) if aligned else (along * whole - number(1)) / number(2)
        least, most = (number(-2), whole + number(1)) if zeros else (number(0), whole - number(1))
        return tirx.max(tirx.min(pixel, most), least)

    def part(pixel: Any, second: Any) -> Any:
        beyond = pixel - tirx.floor(pixel)
        return tirx.Select(second, beyond, number(1) - beyond)

    def place(b: Any, i: Any, j: Any, k: Any) -> Any:
        inside, flat = [], tirx.const(0, "int64")
        for axis, size, second in ((1, height, k // 2), (0, width, k % 2)):
            one = tirx.floor(coordinate((b, i, j), axis, size)).astype("int64") + second
            inside += [one >= 0, one < size]
            flat = flat * size + tirx.max(tirx.min(one, size - 1), _integer(0))
        return tirx.Select(tirx.all(*inside), flat, _integer(-1)) if zeros else flat

    def weight(b: Any, i: Any, j: Any, k: Any) -> Any:
        column, row = (coordinate((b, i, j), axis, size) for axis, size in ((0, width), (1, height)))
        return part(column, k % 2 == 1) * part(row, k // 2 == 1)

    results = [te.compute((*shape[:3], 4), each, each.__name__) for each in (place, weight)]
    function = te.create_prim_func([x, grid, *results])
    return function.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


def _samples(shape: list[Any], picture: list[Any]) -> Any:
    places, weights = te.placeholder(shape, "int64", "places"), te.placeholder(shape, "float32", "weights")
    pixels = te.placeholder(picture, "float32", "pixels")

    def sample(b: Any, i: Any, j: Any, c: Any) -> Any:
        total = None
        for k in map(_integer, range(4)):
            place = places(b, i, j, k)
            value = pixels(b, tirx.max(place, _integer(0)), c)
            value = tirx.Select(place >= 0, value, tirx.const(0, "float32")) * weights(b, i, j, k)
            total = value if total is None else total + value
        return total

    y = te.compute((*shape[:3], picture[2]), sample, "samples")
    function = te.create_prim_func([pixels, places, weights, y])
    return function.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)
