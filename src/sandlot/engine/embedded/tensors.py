"""Reading and writing safetensors files with numpy alone, bfloat16 included (which numpy itself does not know)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandlot.errors import ModelError

Array = NDArray[np.float32]

_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_NAMES = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


def read_tensors(path: Path) -> dict[str, Array]:
    """All tensors of one file as float32 arrays of their own."""
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    try:
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        return {name: _tensor(data[8 + size :], entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as e:
        raise ModelError(f"{path} is not a readable safetensors file ({e}): copy or download it again") from e


def _tensor(data: NDArray[np.uint8], entry: Mapping[str, Any]) -> Array:
    if entry["dtype"] not in _DTYPES:
        raise ModelError(
            f"weights of type {entry['dtype']} are not supported: use a float32, float16 or bfloat16 model"
        )
    start, end = entry["data_offsets"]
    flat = np.frombuffer(data[start:end].tobytes(), _DTYPES[entry["dtype"]])
    if entry["dtype"] == "BF16":
        return (flat.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return flat.astype(np.float32, copy=True).reshape(entry["shape"])


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write float arrays as one safetensors file, in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        shape, end = list(tensor.shape), offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as f:
        f.write(len(head).to_bytes(8, "little"))
        f.write(head)
        for tensor in tensors.values():
            f.write(np.ascontiguousarray(tensor).data)


def read_checkpoint(directory: Path) -> dict[str, Array]:
    """All tensors of a checkpoint directory: `model.safetensors`, or the shards its index names."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists():
        return read_tensors(single)
    if not index.exists():
        raise ModelError(f"{directory} holds no model.safetensors: give a Hugging Face checkpoint directory")
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Array] = {}
    for shard in shards:
        tensors |= read_tensors(directory / shard)
    return tensors
