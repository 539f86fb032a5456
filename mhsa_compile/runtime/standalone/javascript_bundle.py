"""A bundle for browsers and Node: an artifact for WebAssembly as files that a page fetches.

    attention.js             an ES module, with three beside it: `load()`, then `run({x: {data, dims}})`
    attention.d.ts           its types for TypeScript, with the inputs and outputs by name
    attention.wasm           the code
    weights.safetensors, manifest.json
    package.json, README.md

`bundle.bundle` writes it where an artifact's target is WebAssembly. Nothing of it comes from anywhere else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from mhsa_compile.errors import InputError
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MANIFEST, MODULE, WEIGHTS, Manifest, TensorInfo
from mhsa_compile.runtime.standalone.templates import table
from mhsa_compile.runtime.symbolic_dims import is_expression

CODE = "attention.wasm"
_FILES = Path(__file__).parent / "javascript"
_TYPES = "attention.d.ts"
_ARRAYS = {
    **{"bool": "Uint8Array", "float16": "Uint16Array", "bfloat16": "Uint16Array"},
    **{"int64": "BigInt64Array", "uint64": "BigUint64Array", "float32": "Float32Array", "float64": "Float64Array"},
}
"""JavaScript's arrays by dtype, where they are not called as the dtype is."""


def check(manifest: Manifest) -> None:
    """Raises InputError, by name, for what the program in JavaScript has not."""
    for info in manifest.inputs:
        for dim in (*info.dims, *(info.broadcast or ()), info.most):
            if dim is not None and is_expression(dim):
                hint = "Fix its sizes, or give them names of their own."
                raise InputError("artifact", "inputs whose sizes are numbers or names", f"{info.name} of {dim!r}", hint)


def write(artifact: Artifact, folder: Path) -> None:
    """Writes the bundle's files into a folder. Raises ArtifactError and OSError."""
    manifest = artifact.manifest
    artifact.copy(folder)
    for entry in list(folder.iterdir()):
        if entry.name not in (MODULE, WEIGHTS, MANIFEST):
            entry.unlink()
    (folder / MODULE).rename(folder / CODE)
    for file in _FILES.iterdir():
        if file.suffix == ".js":
            shutil.copyfile(file, folder / file.name)
    types = (_FILES / _TYPES).read_text(encoding="utf-8")
    types += _interface("Inputs", "What a call takes.", manifest.inputs)
    types += _interface("Outputs", "What a call gives.", manifest.outputs)
    (folder / _TYPES).write_text(types, encoding="utf-8")
    (folder / "package.json").write_text(_package(), encoding="utf-8")
    (folder / "README.md").write_text(_readme(manifest), encoding="utf-8")


def _interface(name: str, words: str, infos: Iterable[TensorInfo]) -> str:
    """An interface of TypeScript with a tensor for each of `infos`."""
    rows = "".join(
        f"  /** {info.dtype} of [{', '.join(map(str, info.dims))}] */\n"
        f"  {json.dumps(info.name)}: Tensor<{array_type(info.dtype)}>;\n"
        for info in infos
    )
    return f"\n/** {words} */\nexport interface {name} {{\n{rows}}}\n"


def array_type(dtype: str) -> str:
    """JavaScript's array for a dtype. Of floats of 16 bits and of bools it holds the bits.

    >>> array_type("int32")
    'Int32Array'
    """
    return _ARRAYS.get(dtype) or f"{dtype.capitalize()}Array"


def _package() -> str:
    fields = {"name": "attention", "private": True, "type": "module", "main": "attention.js", "types": _TYPES}
    return json.dumps(fields, indent=2) + "\n"


def _readme(manifest: Manifest) -> str:
    """The README: what the bundle is, how it is called, and what it takes and gives."""
    first = manifest.inputs[0] if manifest.inputs else None
    array = "Float32Array" if first is None else array_type(first.dtype)
    name = "x" if first is None else first.name
    target = manifest.target
    assert isinstance(target, CpuProfile)  # of WebAssembly's
    features = " and ".join(target.hardware.features)
    return f"""\
# A compiled attention for browsers and Node

Compiled by mhsa-compile {manifest.mhsa_version} to WebAssembly, for a browser or Node with {features}. Serve this
folder as it is; it needs no server of its own, no build and no network beyond its own files.

```js
import {{ load }} from "./attention.js";

const attention = await load();  // fetches and checks the files beside attention.js
const outputs = attention.run({{ {json.dumps(name)}: {{ data: new {array}(...), dims: [...] }}, ... }});
```

It takes

{table(manifest.inputs)}
and gives

{table(manifest.outputs)}
A dim in letters is any size from 1 on, the same wherever it occurs. `load({{ folder }})` reads the files from another
URL, `load({{ weights }})` takes weights as an ArrayBuffer of safetensors or as arrays by name, and packs them once.
Arrays of float16 and bfloat16 are their bits, bools are bytes. No call changes the arrays that it is given: a cache
that other programs write in place comes back as an output. A call runs in the thread that makes it: where a page has to
stay awake, in a Worker. `attention.d.ts` has the types.
"""
