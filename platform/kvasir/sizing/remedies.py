"""Changes that make a model fit that does not, each tried by the same arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvasir.hardware.gpus import GPUS, Gpu
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.fit import ModelFiles, Need, RankMemory, fit, need_of
from kvasir.sizing.kv import kv_need
from kvasir.sizing.shape import EngineShape

_TENSOR_SIZES = (2, 4, 8, 16)
_HIGHEST_UTILIZATION = 0.95
_SHORTEST = 256
_MOST = 4


@dataclass(frozen=True, slots=True)
class Attempt:
    """An engine that does not fit: on `gpu`, if its model is known, of whose memory `gpus` is the fraction or
    number that the pool reserves for each replica on each of its `nodes`."""

    files: ModelFiles
    shape: EngineShape
    memory: RankMemory
    gpu: Gpu | None
    gpus: float
    nodes: int = 1


def remedies(attempt: Attempt) -> list[str]:
    """Return at most _MOST changes that each make it fit, the least one first. Empty if none does."""
    found: list[str] = []
    for change in _changes(attempt):
        found.append(change)
        if len(found) == _MOST:
            break
    return found


def _changes(attempt: Attempt) -> Iterator[str]:
    need = need_of(attempt.files, attempt.shape)
    yield from _explicit_kv(attempt, need)
    yield from _lengths(attempt, need)
    yield from _fp8_kv(attempt)
    yield from _utilization(attempt, need)
    yield from _no_draft(attempt)
    yield from _tensor(attempt)
    yield from _fp8_weights(attempt)
    yield from _fewer_sequences(attempt)
    yield from _fewer_adapters(attempt)
    yield from _other_gpus(attempt, need)


def _fits(need: Need, memory: RankMemory) -> bool:
    return not fit(need, memory).missing


def _explicit_kv(attempt: Attempt, need: Need) -> Iterator[str]:
    if attempt.memory.kv_bytes is not None and _fits(need, replace(attempt.memory, kv_bytes=None)):
        yield "leave engine.kv_cache_bytes out"


def _lengths(attempt: Attempt, need: Need) -> Iterator[str]:
    """The longest max_model_len that fits, by bisection."""
    low, high = 0, attempt.shape.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        shorter = replace(attempt.shape, max_model_len=middle)
        kv = kv_need(attempt.files.config, shorter, attempt.files.draft)
        low, high = (middle, high) if _fits(replace(need, kv=kv), attempt.memory) else (low, middle - 1)
    if low >= _SHORTEST:
        yield f"set model.max_model_len to {low} or less"


def _fp8_kv(attempt: Attempt) -> Iterator[str]:
    if attempt.shape.kv_dtype.startswith("fp8"):
        return
    if _fits(need_of(attempt.files, replace(attempt.shape, kv_dtype="fp8")), attempt.memory):
        yield "set engine.kv_dtype: fp8"


def _utilization(attempt: Attempt, need: Need) -> Iterator[str]:
    memory = attempt.memory
    whole = min(1.0, attempt.gpus)
    if memory.kv_bytes is not None or memory.utilization >= _HIGHEST_UTILIZATION * whole:
        return
    if _fits(need, replace(memory, utilization=_HIGHEST_UTILIZATION * whole)):
        yield f"set engine.gpu_memory_utilization: {_HIGHEST_UTILIZATION}"


def _tensor(attempt: Attempt) -> Iterator[str]:
    """The smallest number of ranks that divides the heads, on GPUs of their own."""
    shape, heads = attempt.shape, dimensions(attempt.files.config).heads
    whole = _whole(attempt)
    for size in _TENSOR_SIZES:
        gpus, rest = divmod(size * shape.pipeline * shape.data, attempt.nodes)
        if size <= shape.tensor or not heads or heads % size or rest:
            continue
        if _fits(need_of(attempt.files, replace(shape, tensor=size)), whole):
            yield f"set engine.tensor_parallel_size: {size} and gpus: {gpus}"
            return


def _whole(attempt: Attempt) -> RankMemory:
    """Return the memory of a GPU that is not shared with other pools."""
    share = min(1.0, attempt.gpus) or 1.0
    return replace(attempt.memory, utilization=attempt.memory.utilization / share)


def _fp8_weights(attempt: Attempt) -> Iterator[str]:
    capable = attempt.gpu is None or attempt.gpu.fp8 > 0
    if not capable or attempt.files.config.quantization is not None or attempt.shape.quantization != "none":
        return
    if _fits(need_of(attempt.files, replace(attempt.shape, quantization="fp8")), attempt.memory):
        yield "set model.quantization: fp8"


def _fewer_sequences(attempt: Attempt) -> Iterator[str]:
    fewer = attempt.shape.max_num_seqs
    while fewer > 1:
        fewer //= 2
        if _fits(need_of(attempt.files, replace(attempt.shape, max_num_seqs=fewer)), attempt.memory):
            yield f"set engine.max_num_seqs to {fewer} or less"
            return


def _fewer_adapters(attempt: Attempt) -> Iterator[str]:
    for fewer in range(attempt.shape.adapters - 1, 0, -1):
        if _fits(need_of(attempt.files, replace(attempt.shape, adapters=fewer)), attempt.memory):
            yield f"serve at most {fewer} LoRA adapters (lora, lora_loading.max_adapters), or of a lower rank"
            return


def _no_draft(attempt: Attempt) -> Iterator[str]:
    alone = replace(attempt.files, draft=None)
    if attempt.files.draft is not None and _fits(need_of(alone, attempt.shape), attempt.memory):
        yield "leave engine.speculative out"


def _other_gpus(attempt: Attempt, need: Need) -> Iterator[str]:
    names = fitting_gpus(need, attempt.memory)
    if attempt.gpu is not None and names:
        yield "use " + " or ".join(names)


def fitting_gpus(need: Need, memory: RankMemory, most: int = 3) -> Sequence[str]:
    """Return the names of the smallest GPUs of the catalogue on which `need` fits, with the same share."""
    fitting = [gpu for gpu in GPUS if _fits(need, replace(memory, total=gpu.memory_bytes))]
    return [gpu.name for gpu in sorted(fitting, key=lambda gpu: gpu.memory_bytes)[:most]]
