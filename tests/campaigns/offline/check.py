"""What is missing on a machine with a GPU and without a network, before anything is tried there; exit code 1."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

MODULES = ("torch", "onnx", "onnxscript", "numpy", "ml_dtypes", "safetensors", "typer", "rich", "psutil", "cloudpickle",
           "packaging", "tqdm", "yaml", "markupsafe", "pytest", "xdist", "hypothesis",
           "msgspec", "tvm_ffi", "mhsa_compile")  # fmt: skip
COMPILING = ("tvm", "optuna", "sqlalchemy", "ziglang")
PROGRAMS = ("nvcc", "cc")


def missing() -> list[str]:
    """What is missing here, one line for each."""
    has_compiler = Path(__file__).with_name("tvm").joinpath("lib", "libtvm_compiler.so").is_file()
    found = [said for name in (*MODULES, *(COMPILING if has_compiler else ())) if (said := _refused(name))]
    found += [f"{name}: not on the path" for name in PROGRAMS if has_compiler and shutil.which(name) is None]
    return found + ([] if found else _gpu())


def _refused(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a module for another Python may fail in any way
        return f"{name}: {type(error).__name__}, {error}"
    return None


def _gpu() -> list[str]:
    import torch

    from mhsa_compile.errors import MhsaError
    from mhsa_compile.runtime import cuda_devices

    try:
        driver = cuda_devices.driver()
        names = [driver.gpu(index).name for index in range(driver.count)]
    except MhsaError as error:
        return [str(error)]
    print(f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}; driver for CUDA {driver.cuda}; {names}")
    return [] if names and torch.cuda.is_available() else ["no GPU that PyTorch can use"]


if __name__ == "__main__":
    lines = missing()
    print(*(lines or ["nothing is missing"]), sep="\n")
    sys.exit(1 if lines else 0)
