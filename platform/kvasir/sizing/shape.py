"""The settings of an engine on which its memory depends."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine. `tensor`, `pipeline` and `data` are its parallel sizes; with `expert_parallel` experts are
    divided among tensor x data ranks whole, and each in parts otherwise; `redundant_experts` are copies that
    each layer has beside the model's own. `quantization` is done at load: `none`, `int8` or `fp8`. With
    `keeps_windows`, layers with a sliding window keep KV of their window only, and of every token otherwise.
    `steps_in_flight` is how many batches may be scheduled at once. `adapters` are
    the slots of LoRA adapters, each of rank `adapter_rank`. Lengths in tokens."""

    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert_parallel: bool = False
    redundant_experts: int = 0
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "none"
    prefix_caching: bool = True
    keeps_windows: bool = True
    steps_in_flight: int = 2
    cuda_graphs: bool = True
    adapters: int = 0
    adapter_rank: int = 0

    @property
    def ranks(self) -> int:
        """The number of GPUs of one replica."""
        return self.tensor * self.pipeline * self.data


def element_bytes(dtype: str) -> int:
    """Return the bytes of an unquantized weight as served: vLLM serves float32 checkpoints in 16 bits unless
    the spec names float32."""
    if dtype != "auto":
        return ELEMENT_BYTES[dtype]
    return 2


def kv_element_bytes(shape: EngineShape) -> int:
    """Return the bytes of an element of the KV cache."""
    return 1 if shape.kv_dtype.startswith("fp8") else element_bytes(shape.dtype)


def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, divided as vLLM divides them: a remainder goes to the stages
    before the last."""
    sizes = [layers // pipeline] * pipeline
    for at in range(2, layers % pipeline + 2):
        sizes[-at] += 1
    starts = [sum(sizes[:stage]) for stage in range(pipeline)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
