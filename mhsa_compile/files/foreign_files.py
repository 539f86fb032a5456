"""What a file that is no ONNX model probably is, by its name and its first bytes, and what to do with it."""

from __future__ import annotations

import os

from mhsa_compile.files.places import is_file, is_folder

_PYTORCH = "It is PyTorch's: load it in Python, and call mhsa.compile(module, example_inputs=...) or torch.onnx.export."
_WEIGHTS = "It holds weights: load the model they are of in Python, and call mhsa.compile(module, example_inputs=...)."
_GGUF = "It holds weights: mhsa.accelerate(model, linears=mhsa.read_checkpoint(path)) binds them to a model's linears."
_TENSORFLOW = "It is TensorFlow's: tf2onnx makes an .onnx file of it."
_COMPILED = "Another tool compiled or converted it: export the model that it was made from to .onnx."
_DATA = "It is the external data of an .onnx file: name that file."
_PACKED = "Unpack it, and name the .onnx file in it."
_POINTER = "It is a pointer of Git LFS, in place of the file: run `git lfs pull`, or download the file itself."
_PAGE = "It is a web page, in place of the file: download it again by the link to the file itself."
_HUB = "A model of Hugging Face's hub becomes an .onnx file by `optimum-cli export onnx --model NAME DIR`."
_URL = "Download the file first."

_BY_HEAD = {
    b"version https://git-lfs": _POINTER, b"<!DOCTYPE html": _PAGE, b"<!doctype html": _PAGE, b"<html": _PAGE,
    b"GGUF": _GGUF, b"\x89HDF": _TENSORFLOW, b"\x1f\x8b": _PACKED, b"\x80\x02": _PYTORCH, b"<?xml": _COMPILED,
}  # fmt: skip
_BY_NAME = {
    (".pt", ".pth", ".pt2", ".ckpt", ".bin", ".pkl"): _PYTORCH, (".safetensors", ".npz", ".npy"): _WEIGHTS,
    (".gguf", ".ggml"): _GGUF, (".pb", ".h5", ".hdf5", ".keras", ".tflite"): _TENSORFLOW,
    (".xml", ".mlir", ".vmfb", ".engine", ".plan", ".trt", ".mlpackage", ".mlmodel", ".so", ".ort"): _COMPILED,
    (".onnx.data", ".onnx_data"): _DATA, (".zip", ".tar", ".gz", ".tgz"): _PACKED,
    (".json", ".yaml", ".yml"): "Write the fields of a spec as TOML: embed_dim = 512, a line each.",
}  # fmt: skip


def hint_of(path: str | os.PathLike[str]) -> str:
    """What to do with a file, a folder or a name that is no ONNX model; "" where nothing tells."""
    name = os.fspath(path)
    if is_folder(name):
        return _hint_of_folder(name)
    if is_file(name) and (hint := _hint_of_head(name)):
        return hint
    if "://" in name or name.startswith(("http:/", "https:/")):
        return _URL
    for endings, hint in _BY_NAME.items():
        if name.lower().endswith(endings):
            return hint
    return "" if is_file(name) or name.startswith((".", "-", os.sep)) or "." in name or not name else _HUB


def _hint_of_folder(folder: str) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    if models := [name for name in names if name.endswith(".onnx")]:
        return f"In this folder lies {os.path.join(folder, models[0])!r}."
    if "saved_model.pb" in names:
        return _TENSORFLOW
    return _HUB if "config.json" in names else ""


def _hint_of_head(path: str) -> str:
    try:
        with open(path, "rb") as file:
            head = file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
    except OSError:
        return ""
    if head[4:8] == b"TFL3":
        return _TENSORFLOW
    return next((hint for start, hint in _BY_HEAD.items() if head.startswith(start)), "")
