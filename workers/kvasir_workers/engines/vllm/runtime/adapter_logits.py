"""Log-probabilities of prompts from engines with LoRA adapters, on CPUs.

After each step vLLM adds the adapters' share of the output layer to the logits of the rows that are sampled,
one for each request. A request for log-probabilities of its prompt has its other rows computed the same way.
vLLM's CPU kernels then look for an adapter for each of those rows, find one for each request, and end the
engine with "einsum(): subscript b has size …" as soon as two requests share the step. Here such rows get the
output layer alone. That is exact for adapters that leave the output layer as it is.
"""

from __future__ import annotations

import functools
from typing import Any


def serve_prompt_rows() -> None:
    """Change vLLM's CPU kernels in this process. May be called again."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    kernels: Any = PunicaWrapperCPU
    original = kernels.add_lora_logits
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def add_lora_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if x.numel() // x.shape[-1] == self.sampler_indices.numel():
            original(self, y, x, *args, **kwargs)

    kernels.add_lora_logits = add_lora_logits
