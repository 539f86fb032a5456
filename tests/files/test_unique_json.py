"""Two entries of one name: refused in every JSON that is read, as readers disagree on which of the two counts."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mhsa_compile.errors import ArtifactError, InputError, SpecError
from mhsa_compile.files.input_files import require_unique_keys
from mhsa_compile.runtime.artifact.manifest import read_manifest
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.runtime.weight_binding import _read
from mhsa_compile.spec.attention_spec import AttentionSpec

ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def _file(header: str, data: bytes = b"\0\0\0\0") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "\\u0061": 2}}]', '{"a": 1, "b": 2, "b": null}'], ids=range(3)
)
def test_names_are_compared_as_read(text: str) -> None:
    with pytest.raises(ValueError, match="two entries of one name"):
        require_unique_keys(text)


def test_one_name_in_two_objects_is_none_twice() -> None:
    require_unique_keys('{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]}')


def test_weights(tmp_path: Path) -> None:
    twice = _file(f'{{"x":{ENTRY},"x":{ENTRY}}}')
    with pytest.raises(ValueError, match="'x'"):
        read_tensors(BytesIO(twice), len(twice))
    path = tmp_path / "w.safetensors"
    path.write_bytes(twice)
    with pytest.raises(InputError, match="two entries of one name, 'x'"):
        _read(path)
    save_file({"x": np.ones(3, np.float32)}, path)
    assert _read(path)["x"].tolist() == [1, 1, 1]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InputError, match="safetensors"):
        _read(path)


def test_manifests_and_specs() -> None:
    fields = json.dumps({"format_version": 6})
    with pytest.raises(ArtifactError, match="two entries of one name, 'format_version'"):
        read_manifest(f'{fields[:-1]}, "format_version": 6}}'.encode(), "manifest")
    with pytest.raises(SpecError, match="two entries of one name, 'num_heads'"):
        AttentionSpec.from_json('{"embed_dim": 8, "num_heads": 2, "num_heads": 4}')
