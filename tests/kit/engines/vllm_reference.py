"""vLLM alone in this process, without our code: the reference for the output of the whole stack.

float32 and one thread, as in the deployment under test, so that equal requests have equal tokens.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.suite.started import count_start

from kvasir.config.spec.deployment import Deployment
from kvasir_workers.engines.vllm.setup.arguments import environment

SLOTS, RANK = 3, 16
"""Adapters that the reference has room for, and their highest rank."""


class Reference:
    """One engine of the model in `folder`, with the LoRA `adapter`, if any. Each call is a separate batch."""

    def __init__(self, folder: Path, adapter: Path | None, *, max_model_len: int, **arguments: Any) -> None:
        from vllm import LLM
        from vllm.envs import disable_envs_cache
        from vllm.lora.request import LoRARequest

        self.folder = folder
        self._adapter = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
        self._llm = LLM(
            model=str(folder),
            dtype="float32",
            max_model_len=max_model_len,
            block_size=32,
            kv_cache_memory_bytes=32 << 20,
            max_num_seqs=16,
            enforce_eager=True,
            disable_log_stats=True,
            **({} if adapter is None else {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK}),
            **arguments,
        )
        # Other tests of this process set variables of their own while the engine is there.
        disable_envs_cache()

    def generate(
        self,
        prompt: Sequence[int],
        *,
        adapted: bool = False,
        media: Mapping[str, Sequence[Any]] | None = None,
        **sampling: Any,
    ) -> Any:
        """The RequestOutput for token ids, with one placeholder for each of the `media`, by their kind as in
        vLLM's `multi_modal_data`; `sampling` are vLLM's SamplingParams."""
        from vllm import SamplingParams

        seen = {} if media is None else {"multi_modal_data": {kind: list(of) for kind, of in media.items()}}
        (done,) = self._llm.generate(
            [{"prompt_token_ids": list(prompt), **seen}],
            SamplingParams(**sampling),
            use_tqdm=False,
            lora_request=self._adapter if adapted else None,
        )
        return done

    def chat(self, messages: Sequence[Any], **sampling: Any) -> Any:
        """The RequestOutput for messages as of OpenAI's API, whose media vLLM reads itself."""
        from vllm import SamplingParams

        (done,) = self._llm.chat([list(messages)], SamplingParams(**sampling), use_tqdm=False)
        return done

    def adapter_bytes(self) -> int:
        """The bytes of the tensors that vLLM has made for its slots for adapters."""

        def held(model: Any) -> int:
            tensors: dict[int, int] = {}
            for module in model.modules():
                for name in ("lora_a_stacked", "lora_b_stacked"):
                    made = vars(module).get(name, ())
                    for each in made if isinstance(made, list | tuple) else [made]:
                        tensors[id(each)] = each.numel() * each.element_size()
            return sum(tensors.values())

        (found,) = self._llm.apply_model(held)
        return int(found)

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()


@contextmanager
def reference(
    folder: Path, adapter: Path | None, *, max_model_len: int, **arguments: Any
) -> Iterator[Reference]:
    """A running reference, with further `arguments` of vLLM; its environment variables are restored at the
    end."""
    before = dict(os.environ)
    deployment = Deployment()
    os.environ.update(environment(deployment, deployment.pools[0], cpus=1, platform="cpu"))
    # `adapter_bytes` sends a function to the engine.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    try:
        with warnings.catch_warnings():
            # Warnings of vLLM and torch while an engine starts are not the test's.
            warnings.simplefilter("ignore")
            count_start("engines of vLLM", "vLLM alone")
            made = Reference(folder, adapter, max_model_len=max_model_len, **arguments)
        try:
            yield made
        finally:
            made.close()
    finally:
        os.environ.clear()
        os.environ.update(before)
