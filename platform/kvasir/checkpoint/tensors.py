"""Names, shapes and sizes of a model's tensors, from the headers of its safetensors files.

Only headers are read: kilobytes of files of gigabytes. They also show whether a file is whole, because each
states where its last tensor ends. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import msgspec

from kvasir.checkpoint.json_file import LFS_POINTER, read_json_object, refuse_lfs_pointer
from kvasir.core.errors import ConfigError

HEADER_LIMIT_BYTES = 100_000_000
"""The format's limit."""

_LENGTH_BYTES = 8
_ADAPTER = "adapter_model.safetensors"
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorHeader(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a checkpoint. `dtype` is the format's code, such as BF16 or F8_E4M3; `file` is the name
    of the shard. A struct, because a large mixture of experts has a hundred thousand."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


class _Entry(msgspec.Struct, gc=False):
    """The defaults are for `__metadata__`, which is the only entry that is no tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that vLLM loads from `folder`: `consolidated*` files if there are any, and
    of the others those that the index names. Raises ConfigError if there are none, or if one that the index
    names is missing."""
    present = sorted(folder.glob("consolidated*.safetensors"))
    index = folder / ("consolidated.safetensors.index.json" if present else "model.safetensors.index.json")
    if not index.is_file():
        present = present or sorted(folder.glob("*.safetensors"))
        if not present:
            raise ConfigError(f"{folder} has no safetensors files{_other_weights(folder)}")
        if [path.name for path in present] == [_ADAPTER]:
            raise ConfigError(
                f"{folder} has the weights of a LoRA adapter only ({_ADAPTER}); set model.source to the "
                "model that it was trained for, and name this folder in `lora`"
            )
        single = folder / "model.safetensors"
        return (single,) if single in present else tuple(present)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if missing := [name for name in names if not (folder / name).is_file()]:
        first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ConfigError(f"{folder} lacks {len(missing)} of the {len(names)} files in {index.name}: {first}")
    return tuple(folder / name for name in names)


def _other_weights(folder: Path) -> str:
    """Return which weights of another format `folder` has, and what to do."""
    if pickled := next(iter(sorted(folder.glob("*.bin"))), None):
        code = f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        return (
            f", and {pickled.name} is a pickle, which can run code and is not read; if you trust it, write "
            f'them: python -c "from transformers import AutoModelForCausalLM as M; {code}"'
        )
    if other := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f", and {other.name} is not read; download the safetensors files of the model"
    return ""


def read_tensors(folder: Path) -> tuple[TensorHeader, ...]:
    """Return the tensors of all weight files of `folder`. Raises ConfigError for a file that is missing,
    truncated or invalid, and names it."""
    return tuple(tensor for path in weight_files(folder) for tensor in tensors_of(path))


def tensors_of(path: Path) -> list[TensorHeader]:
    """Return the tensors of one file. Raises ConfigError for a file that is missing, truncated or invalid."""
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            start = stream.read(_LENGTH_BYTES)
            if len(start) < _LENGTH_BYTES:
                raise ConfigError(f"{path} is truncated: {size} bytes are no safetensors file")
            length = struct.unpack("<Q", start)[0]
            if length > HEADER_LIMIT_BYTES:
                refuse_lfs_pointer(path, start + stream.read(len(LFS_POINTER)))
                raise ConfigError(f"{path} is no safetensors file: its header would have {length} bytes")
            header = stream.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(header) < length:
        raise ConfigError(f"{path} is truncated: its header has {length} bytes, and the file {size}")
    tensors, end = _parse(path, header)
    expected = _LENGTH_BYTES + length + end
    if size < expected:
        raise ConfigError(f"{path} is truncated: it has {size} bytes, and its header describes {expected}")
    if size > expected:
        raise ConfigError(f"{path} is invalid: {size - expected} bytes follow its last tensor")
    return tensors


def _parse(path: Path, header: bytes) -> tuple[list[TensorHeader], int]:
    """Return the tensors of a header, and where the last one ends, in bytes after the header."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no safetensors file: its header is invalid: {error}") from error
    entries.pop("__metadata__", None)
    tensors, ranges, file = [], [], path.name
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        bits = _DTYPE_BITS.get(entry.dtype, 0)
        if not entry.dtype or (bits and (end - begin) * 8 != math.prod(entry.shape) * bits):
            what = f"tensor {name} of {entry.dtype or 'no dtype'} {list(entry.shape)}"
            raise ConfigError(f"{path} is invalid: {what} has {end - begin} bytes")
        ranges.append((begin, end))
        tensors.append(TensorHeader(name, entry.dtype, entry.shape, end - begin, file))
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            raise ConfigError(f"{path} is invalid: its tensors overlap or leave gaps at byte {begin}")
        position = end
    return tensors, position
