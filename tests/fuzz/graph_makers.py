"""What a random graph is made of: each adds one node, or a few that belong together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from fuzz.graph_drawing import CODES, Drawing, Value

UNARY = ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Identity", "Neg", "Relu", "Round", "Sigmoid", "Sign", "Sin",
         "Softplus", "Softsign", "Tanh")  # fmt: skip
Maker = Callable[[Drawing], None]
"""Adds a node, or nothing where no value fits."""
FLOATS = ("float32", "float16")


def unary(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        d.node(d.one_of(*UNARY), [v.name], v.dtype, v.shape, v.free)


def activation(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        op, said = d.one_of(("LeakyRelu", {"alpha": 0.3}), ("Elu", {"alpha": 0.7}), ("Selu", {"gamma": 1.3}),
                            ("HardSigmoid", {"alpha": 0.4, "beta": 0.3}), ("ThresholdedRelu", {"alpha": 0.4}),
                            ("Celu", {"alpha": 0.8}), ("LeakyRelu", {}), ("HardSigmoid", {}))  # fmt: skip
        if op == "Celu" and v.dtype != "float32":  # the standard has it of no other
            return
        d.node(op, [v.name], v.dtype, v.shape, v.free, **said)


def binary(d: Drawing) -> None:
    if v := d.value("float32", "float16", "int64", "int32"):
        other = v.name
        if d.perhaps(0.7):
            shape = [1 if i == 0 or d.perhaps(0.4) else n for i, n in enumerate(v.shape)]
            array = d.rng.integers(1, 5, shape[d.one_of(0, 1) :]) if v.dtype[0] == "i" else d.rng.standard_normal(shape)
            other = d.constant(array.astype(v.dtype))
        names = [v.name, other]
        op = d.one_of("Add", "Sub", "Mul", "Max", "Min", "Div" if v.dtype[0] == "f" else "Add")
        d.node(op, names if d.perhaps(0.7) or op == "Div" else names[::-1], v.dtype, v.shape, v.free)


def compared(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        edge = d.constant(np.asarray(d.rng.standard_normal(), v.dtype))
        d.node(d.one_of("Less", "Greater", "LessOrEqual", "GreaterOrEqual"), [v.name, edge], "bool", v.shape, v.free)


def where(d: Drawing) -> None:
    if (v := d.value(*FLOATS)) and (seen := d.value("bool")) and seen.shape == v.shape:
        d.node(
            "Where", [seen.name, v.name, d.constant(np.asarray(d.one_of(0, 2.5), v.dtype))], v.dtype, v.shape, v.free
        )


def cast(d: Drawing) -> None:
    if v := d.value(*CODES):
        to = d.one_of("float32", "int64", "int32", "bool") if v.dtype != "bool" else d.one_of("float32", "int64")
        d.node("Cast", [v.name], to, v.shape, v.free, to=CODES[to])


def clip(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        low, high = (d.constant(np.asarray(x, v.dtype)) for x in (-0.6, 0.8))
        d.node("Clip", d.one_of([v.name, low, high], [v.name, "", high], [v.name, low]), v.dtype, v.shape, v.free)


def reduced(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        op = d.one_of("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")
        axis, keep = d.axis(v, 1), d.one_of(0, 1)
        place = axis % len(v.shape)
        shape = tuple(1 if i == place else n for i, n in enumerate(v.shape) if keep or i != place)
        if op == "ReduceSum" or d.opset >= 18:
            d.node(op, [v.name, d.constant(np.array([axis]))], v.dtype, shape, v.free, keepdims=keep)
        else:
            d.node(op, [v.name], v.dtype, shape, v.free, keepdims=keep, axes=[axis])


def softmax(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        d.node(d.one_of("Softmax", "LogSoftmax", "Softmax"), [v.name], v.dtype, v.shape, v.free,
               **({"axis": d.axis(v, 1)} if d.perhaps(0.8) else {}))  # fmt: skip


def product(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        width = d.one_of(3, 8, 11)
        weight = d.constant((d.rng.standard_normal((v.shape[-1], width)) * 0.4).astype("f4"))
        if len(v.shape) == 2 and d.perhaps(0.5):
            turned = d.constant((d.rng.standard_normal((width, v.shape[-1])) * 0.4).astype("f4"))
            bias = d.constant(d.rng.standard_normal(width).astype("f4"))
            said = {"transB": 1, "alpha": d.one_of(1.0, 0.5), "beta": d.one_of(1.0, 2.0)}
            d.node("Gemm", [v.name, turned, bias], v.dtype, (*v.shape[:-1], width), v.free, **said)
        else:
            d.node("MatMul", [v.name, weight], v.dtype, (*v.shape[:-1], width), v.free)


def moved(d: Drawing) -> None:
    if v := d.value(*CODES, rank=3):
        order = [0, *(1 + d.rng.permutation(len(v.shape) - 1)).tolist()]
        d.node("Transpose", [v.name], v.dtype, tuple(v.shape[i] for i in order), v.free, perm=order)


def sliced(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        size, step = v.shape[axis], d.one_of(1, 2, -1, -2)
        begin, end = (1, size + 5) if step > 0 else (d.one_of(-1, size + 3), -size - 2)
        count = len(range(size)[begin:end:step]) if step > 0 else len(range(size)[::step])
        if count:
            bounds = [d.constant(np.array([n])) for n in (begin, end, axis, step)]
            shape = tuple(count if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
            d.node("Slice", [v.name, *bounds], v.dtype, shape, v.free)


def gathered(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        size, place = v.shape[axis], axis % len(v.shape)
        rows = d.rng.integers(-size, size, d.one_of((), (2,), (2, 3)))
        shape = (*v.shape[:place], *rows.shape, *v.shape[place + 1 :])
        d.node("Gather", [v.name, d.constant(rows)], v.dtype, shape, v.free, axis=axis)


def padded(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        widths = np.zeros((2, len(v.shape)), np.int64)
        widths[:, -1] = d.rng.integers(0, 2, 2)
        mode, fill = d.one_of("constant", "reflect", "edge"), [d.constant(np.float32(1.5))]
        if mode == "reflect" and v.shape[-1] < 2:
            return
        shape = (*v.shape[:-1], int(v.shape[-1] + widths.sum()))
        inputs = [v.name, d.constant(widths.ravel()), *(fill if mode == "constant" else [])]
        d.node("Pad", inputs, v.dtype, shape, v.free, mode=mode)


def joined(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        shape = tuple(2 * n if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        d.node("Concat", [v.name, v.name], v.dtype, shape, v.free, axis=axis)


def summed_up(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        said = {"exclusive": d.one_of(0, 1), "reverse": d.one_of(0, 1)}
        d.node("CumSum", [v.name, d.constant(np.asarray(d.axis(v, 1)))], v.dtype, v.shape, v.free, **said)


def largest(d: Drawing) -> None:
    if not d.may_be_nan and (v := d.value("float32", rank=2)):
        said = {"axis": (axis := d.axis(v, 1)), "keepdims": 1, "select_last_index": d.one_of(0, 1)}
        shape = tuple(1 if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        d.node(d.one_of("ArgMax", "ArgMin"), [v.name], "int64", shape, v.free, **said)


def normalised(d: Drawing) -> None:
    if d.opset >= 17 and (v := d.value("float32", rank=2)):
        scale, bias = (d.constant(d.rng.standard_normal(v.shape[-1]).astype("f4")) for _ in range(2))
        said = {"epsilon": d.one_of(1e-5, 0.1), **({"axis": -1} if d.perhaps(0.5) else {})}
        d.node("LayerNormalization", [v.name, scale, bias], v.dtype, v.shape, v.free, **said)


def reshaped(d: Drawing) -> None:
    if v := d.value(*CODES, rank=2):
        rest = int(np.prod(v.shape[1:]))
        if rest % 2 == 0:
            d.node("Reshape", [v.name, d.constant(np.array([0, 2, -1]))], v.dtype, (v.shape[0], 2, rest // 2), v.free)
        else:
            d.node("Flatten", [v.name], v.dtype, (v.shape[0], rest), v.free)


def attention(d: Drawing) -> None:
    if (v := d.value("float32", rank=3)) and len(v.shape) == 3 and v.shape[-1] <= 32:
        turned = f"t{len(d.nodes)}"
        d.nodes.append(helper.make_node("Transpose", [v.name], [turned], perm=[0, 2, 1]))
        d.node("MatMul", [v.name, turned], "float32", (v.shape[0], v.shape[1], v.shape[1]), v.free)
        d.node("Softmax", [d.values[-1].name], "float32", d.values[-1].shape, v.free, axis=-1)
        d.node("MatMul", [d.values[-1].name, v.name], "float32", v.shape, v.free)


def vendors(d: Drawing) -> None:
    """An operator of nobody's domain under a standard name: to be refused."""
    if (v := d.value("float32", rank=2)) and d.perhaps(0.15):
        d.node(d.one_of("Softmax", "Gelu", "Relu"), [v.name], v.dtype, v.shape, v.free, domain="org.example")


def _spatial(d: Drawing) -> tuple[Value, int] | None:
    """A value (N, C, axes of space) with more than one place on each, and how many axes of space it has."""
    v = d.value("float32", rank=3)
    return (v, len(v.shape) - 2) if v and len(v.shape) <= 4 and min(v.shape[2:]) > 1 else None


def _slid(size: int, kernel: int, stride: int, dilation: int, pads: int) -> int:
    return (size + pads - (dilation * (kernel - 1) + 1)) // stride + 1


def convolution(d: Drawing) -> None:
    if fit := _spatial(d):
        v, axes = fit
        C, groups = v.shape[1], d.one_of(1, 1, v.shape[1])
        out, kernel, stride, dilation = groups * d.one_of(1, 3), d.one_of(1, 2, 3), d.one_of(1, 2), d.one_of(1, 1, 2)
        before, after = d.one_of(0, 1, 2), d.one_of(0, 1)
        sizes = [_slid(n, kernel, stride, dilation, before + after) for n in v.shape[2:]]
        if min(sizes) < 1:
            return
        weight = d.constant((d.rng.standard_normal((out, C // groups, *[kernel] * axes)) * 0.4).astype("f4"))
        bias = [d.constant(d.rng.standard_normal(out).astype("f4"))] if d.perhaps(0.5) else []
        said = {"strides": [stride] * axes, "dilations": [dilation] * axes, "group": groups}
        said["pads"] = [before] * axes + [after] * axes
        d.node("Conv", [v.name, weight, *bias], v.dtype, (v.shape[0], out, *sizes), v.free, **said)


def turned_convolution(d: Drawing) -> None:
    if fit := _spatial(d):
        v, axes = fit
        kernel, stride, pad = d.one_of(2, 3), d.one_of(1, 2), d.one_of(0, 1)
        weight = d.constant((d.rng.standard_normal((v.shape[1], 2, *[kernel] * axes)) * 0.4).astype("f4"))
        more = d.one_of(0, 1) if stride > 1 else 0
        sizes = [stride * (n - 1) + more + kernel - 2 * pad for n in v.shape[2:]]
        if min(sizes) > 0:
            said = {"strides": [stride] * axes, "pads": [pad] * 2 * axes, "output_padding": [more] * axes}
            d.node("ConvTranspose", [v.name, weight], v.dtype, (v.shape[0], 2, *sizes), v.free, **said)


def pooled(d: Drawing) -> None:
    if fit := _spatial(d):
        v, axes = fit
        if d.perhaps(0.3):
            op = d.one_of("GlobalAveragePool", "GlobalMaxPool")
            d.node(op, [v.name], v.dtype, (*v.shape[:2], *[1] * axes), v.free)
            return
        kernel, stride, pad = d.one_of(2, 3), d.one_of(1, 2), d.one_of(0, 1)
        sizes = [_slid(n, kernel, stride, 1, 2 * pad) for n in v.shape[2:]]
        if min(sizes) < 1:
            return
        op = d.one_of("MaxPool", "AveragePool")
        said = {"count_include_pad": d.one_of(0, 1)} if op == "AveragePool" else {}
        said |= {"kernel_shape": [kernel] * axes, "strides": [stride] * axes, "pads": [pad] * 2 * axes}
        d.node(op, [v.name], v.dtype, (*v.shape[:2], *sizes), v.free, **said)


def resized(d: Drawing) -> None:
    if fit := _spatial(d):
        v, axes = fit
        factor = d.one_of(2.0, 0.5, 1.5)
        mode = d.one_of("nearest", "linear")
        said = {"mode": mode, "coordinate_transformation_mode": d.one_of("half_pixel", "asymmetric", "align_corners")}
        said |= {"nearest_mode": d.one_of("floor", "round_prefer_floor", "ceil")} if mode == "nearest" else {}
        sizes = [int(n * factor) for n in v.shape[2:]]
        if min(sizes) < 1:
            return
        scales = d.constant(np.array([1, 1, *[factor] * axes], "f4"))
        d.node("Resize", [v.name, "", scales], v.dtype, (*v.shape[:2], *sizes), v.free, **said)


def channels_normalised(d: Drawing) -> None:
    if fit := _spatial(d):
        v, C = fit[0], fit[0].shape[1]
        scale, bias, mean, spread = (d.constant(np.abs(d.rng.standard_normal(C)).astype("f4")) for _ in range(4))
        if d.perhaps(0.5):
            d.node("InstanceNormalization", [v.name, scale, bias], v.dtype, v.shape, v.free, epsilon=1e-3)
        else:
            d.node("BatchNormalization", [v.name, scale, bias, mean, spread], v.dtype, v.shape, v.free, epsilon=1e-2)


def best(d: Drawing) -> None:
    if not d.may_be_nan and (v := d.value("float32", rank=2)):
        axis = d.axis(v, 1)
        count = int(d.rng.integers(1, v.shape[axis] + 1))
        shape = tuple(count if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        said = {"axis": axis, "largest": d.one_of(0, 1)}
        d.nodes_of(
            "TopK", [v.name, d.constant(np.array([count]))], [(v.dtype, shape), ("int64", shape)], v.free, **said
        )


def scattered(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        count = v.shape[axis]
        shape = tuple(count if i == axis % len(v.shape) else 1 for i in range(len(v.shape)))
        places = np.broadcast_to(d.rng.permutation(count).reshape(shape), (1, *v.shape[1:])) - d.one_of(0, count)
        updates = d.constant(d.rng.standard_normal((1, *v.shape[1:])).astype(v.dtype))
        said = {"reduction": d.one_of("none", "add", "mul")} if d.opset >= 18 else {}
        d.node("ScatterElements", [v.name, d.constant(places), updates], v.dtype, v.shape, v.free, axis=axis, **said)


def picked(d: Drawing) -> None:
    if (v := d.value("float32", "int64", rank=2)) and not v.free:
        axis = d.axis(v, 1)
        shape = tuple(2 if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        places = d.rng.integers(-v.shape[axis], v.shape[axis], shape)
        d.node("GatherElements", [v.name, d.constant(places)], v.dtype, shape, v.free, axis=axis)


def chosen(d: Drawing) -> None:
    """An If on a sum of numbers that only a call knows; its branches read the value from outside."""
    if v := d.value("float32", rank=2):
        total, truth = f"s{len(d.nodes)}", f"t{len(d.nodes)}"
        d.nodes.append(helper.make_node("ReduceSum", [v.name], [total], keepdims=0))
        d.nodes.append(helper.make_node("Greater", [total, d.constant(np.float32(d.one_of(-1e9, 0.3)))], [truth]))
        kind = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        branches = [
            helper.make_graph([helper.make_node(op, [v.name], ["r"])], op, [], [kind])
            for op in (d.one_of("Relu", "Exp", "Tanh"), d.one_of("Neg", "Abs"))
        ]
        d.node("If", [truth], v.dtype, v.shape, v.free, then_branch=branches[0], else_branch=branches[1])


def of_sizes(d: Drawing) -> None:
    """A Reshape, an Expand, a Range or a ConstantOfShape by sizes that the graph takes from a value."""
    if v := d.value("float32", rank=2):
        sizes = f"z{len(d.nodes)}"
        d.nodes.append(helper.make_node("Shape", [v.name], [sizes]))
        form = d.one_of("Reshape", "Expand", "ConstantOfShape", "Range")
        if form == "Reshape":
            first = f"f{len(d.nodes)}"
            d.nodes.append(helper.make_node("Gather", [sizes, d.constant(np.array([0]))], [first]))
            d.nodes.append(helper.make_node("Concat", [first, d.constant(np.array([-1]))], [first + "t"], axis=0))
            d.node("Reshape", [v.name, first + "t"], v.dtype, (v.shape[0], int(np.prod(v.shape[1:]))), v.free)
        elif form == "Expand":
            row = d.constant(d.rng.standard_normal(v.shape[-1]).astype("f4"))
            d.node("Expand", [row, sizes], v.dtype, v.shape, v.free)
        elif form == "ConstantOfShape":
            d.node("ConstantOfShape", [sizes], "float32", v.shape, v.free)
        else:
            count = f"n{len(d.nodes)}_"
            d.nodes.append(helper.make_node("Gather", [sizes, d.constant(np.asarray(0))], [count]))
            bounds = [d.constant(np.asarray(n)) for n in (0, 1)]
            d.node("Range", [bounds[0], count, bounds[1]], "int64", (v.shape[0],), v.free)


def divided(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        size = v.shape[axis]
        if size > 1:
            first = int(d.rng.integers(1, size))
            parts = [
                tuple(n if i == axis % len(v.shape) else m for i, m in enumerate(v.shape))
                for n in (first, size - first)
            ]
            widths = d.constant(np.array([first, size - first]))
            d.nodes_of("Split", [v.name, widths], [(v.dtype, part) for part in parts], v.free, axis=axis)


def repeated(d: Drawing) -> None:
    if v := d.value("float32", "int64", "bool", rank=2):
        times = [1, *(d.one_of(1, 1, 2) for _ in v.shape[1:])]
        shape = tuple(n * t for n, t in zip(v.shape, times, strict=True))
        if np.prod(shape) < 5000:
            d.node("Tile", [v.name, d.constant(np.array(times))], v.dtype, shape, v.free)


def ranked(d: Drawing) -> None:
    if (v := d.value(*CODES, rank=2)) and len(v.shape) < 5:
        axis = int(d.rng.integers(1, len(v.shape) + 1))
        shape = (*v.shape[:axis], 1, *v.shape[axis:])
        d.node("Unsqueeze", [v.name, d.constant(np.array([axis]))], v.dtype, shape, v.free)
    elif v and 1 in v.shape[1:]:
        axis = v.shape.index(1, 1)
        d.node("Squeeze", [v.name, d.constant(np.array([axis]))], v.dtype, v.shape[:axis] + v.shape[axis + 1 :], v.free)


def triangle(d: Drawing) -> None:
    if d.opset >= 14 and (v := d.value("float32", "int64", rank=3)):
        shift = d.constant(np.asarray(d.one_of(-1, 0, 1, 9)))
        d.node("Trilu", [v.name, shift], v.dtype, v.shape, v.free, upper=d.one_of(0, 1))


def of_flags(d: Drawing) -> None:
    if v := d.value("bool"):
        if d.perhaps(0.4):
            d.node("Not", [v.name], "bool", v.shape, v.free)
        else:
            flags = d.constant(d.rng.random(v.shape[1:]) < 0.5)
            d.node(d.one_of("And", "Or", "Xor"), [v.name, flags], "bool", v.shape, v.free)


def odd_numbers(d: Drawing) -> None:
    """Numbers that are none, or too large, and who asks for them."""
    if v := d.value("float32", rank=2):
        row = d.rng.standard_normal(v.shape[-1]).astype("f4")
        row[0] = d.one_of(np.nan, np.inf, -np.inf)
        d.may_be_nan = True
        d.node(d.one_of("Add", "Max", "Min"), [v.name, d.constant(row)], v.dtype, v.shape, v.free)
        if d.perhaps(0.5):
            d.node(d.one_of("IsNaN", "IsInf"), [d.values[-1].name], "bool", v.shape, v.free)


def of_whole_numbers(d: Drawing) -> None:
    if v := d.value("int64", "int32"):
        by = d.constant(np.asarray(d.one_of(2, 3, -3), v.dtype))
        op, said = d.one_of(("Mod", {}), ("Mod", {"fmod": 1}), ("Div", {}), ("Abs", {}), ("Neg", {}), ("Sign", {}))
        d.node(op, [v.name] if op in ("Abs", "Neg", "Sign") else [v.name, by], v.dtype, v.shape, v.free, **said)


def contracted(d: Drawing) -> None:
    if (v := d.value("float32", rank=3)) and len(v.shape) == 3:
        weight = d.constant((d.rng.standard_normal((v.shape[1], v.shape[2], 4)) * 0.4).astype("f4"))
        equation, shape = d.one_of(
            ("bij,ijk->bk", (v.shape[0], 4)),
            ("bij,ijk->bik", (*v.shape[:2], 4)),
            ("bij,ijk->bjk", (v.shape[0], v.shape[2], 4)),
        )
        d.node("Einsum", [v.name, weight], v.dtype, shape, v.free, equation=equation)


MAKERS: tuple[Maker, ...] = (
    unary, activation, binary, binary, compared, where, cast, clip, reduced, softmax, product, product, moved, sliced,
    gathered, padded, joined, summed_up, largest, normalised, reshaped, attention, vendors, convolution, convolution,
    turned_convolution, pooled, resized, channels_normalised, best, scattered, picked, chosen, of_sizes, of_sizes,
    divided, repeated, ranked, triangle, of_flags, odd_numbers, of_whole_numbers, contracted,
)  # fmt: skip
