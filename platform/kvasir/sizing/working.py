"""The memory that an engine uses beside weights and KV: an estimate of what vLLM measures when it starts.

vLLM profiles a step of max_num_batched_tokens tokens and max_num_seqs sampled ones, and captures CUDA graphs
(`Worker.determine_available_memory`). The terms are the largest tensors of such a step in vLLM's layers. The
constants are of vLLM's own logs and documentation, and are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.shape import EngineShape, element_bytes

CONTEXT_BYTES = 600 << 20
"""CUDA's context and its kernels, outside of what `gpu_memory_utilization` divides: nvidia-smi shows 0.5 to
0.6 GiB on Hopper."""
GRAPH_BYTES = 600 << 20
"""CUDA graphs of decoding steps: vLLM logs 0.1 to 0.6 GiB ("Graph capturing finished ... took")."""
LIBRARY_BYTES = 350 << 20
"""Memory that torch did not allocate, with one rank: vLLM logs 0.33 GiB of `non_torch_memory`."""
COLLECTIVES_BYTES = 1 << 30
"""The same with several ranks, which have NCCL's buffers: 1 GiB in vLLM's example (`memory_profiling`)."""
_SAMPLER_BYTES = 24
"""Bytes for each logit of a sampled token: float32 logits and probabilities, sorted copies, and indices."""
_RESIDUALS = 4
"""Hidden states that a layer holds at once: its input, the residual, and two in between."""


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes on one rank: the activations of a step, CUDA graphs, and what libraries allocate themselves."""

    activations: int
    graphs: int
    libraries: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.activations + self.graphs + self.libraries


def working_memory(config: ModelConfig, shape: EngineShape) -> Working:
    """Return the estimated memory of a rank beside weights and KV."""
    several = shape.tensor * shape.pipeline > 1 or (shape.data > 1 and dimensions(config).experts > 0)
    return Working(
        activations=_activations(config, shape),
        graphs=GRAPH_BYTES if shape.cuda_graphs else 0,
        libraries=COLLECTIVES_BYTES if several else LIBRARY_BYTES,
    )


def _activations(config: ModelConfig, shape: EngineShape) -> int:
    sizes = dimensions(config)
    attention = (2 * sizes.heads * sizes.head_size + 2 * sizes.kv_heads * sizes.head_size) // shape.tensor
    if sizes.experts and sizes.experts_per_token:
        width = sizes.expert_size if shape.expert_parallel else sizes.expert_size // shape.tensor
        # The two workspaces of vLLM's fused experts, for each expert of a token.
        largest = max(2 * width, sizes.hidden) + max(width, sizes.hidden)
        layer = sizes.experts_per_token * largest
    else:
        layer = 3 * sizes.intermediate // shape.tensor
    token = _RESIDUALS * sizes.hidden + max(attention, layer)
    sampled = min(shape.max_num_seqs, shape.max_num_batched_tokens)
    step = shape.max_num_batched_tokens * token * element_bytes(shape.dtype)
    return step + sampled * sizes.vocabulary * _SAMPLER_BYTES
