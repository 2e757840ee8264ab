"""Preparation of legs with parsing or an output rule: their parsers, and a validated rule.

Most of this is slow the first time, and a client's schema can make it slow, so it runs in threads, with a
timeout, and is cached for requests with the same options; an agent sends the same tools at every turn. A
cached preparation takes microseconds and keeps a request's place in the queue.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from kvasir.core.requests import EngineRequest, Leg, StructuredOutput
from kvasir_workers.engines.continued import continued_tokens
from kvasir_workers.engines.vllm.output import continuation
from kvasir_workers.engines.vllm.output.parsing import ChoiceParser, Parsers, Understanding
from kvasir_workers.engines.vllm.output.preparing_queue import Busy
from kvasir_workers.engines.vllm.output.structured import StructuredRules, structured_params

T = TypeVar("T")

TIME_LIMIT_S = 10.0
_THREADS = 2
_KEPT = 256
_KEPT_BYTES = 16 << 20
_MAX_INLINE_CHOICES = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parameters of vLLM for a leg besides its sampling, and the parsers of its choices, none for a leg
    without parsing. `reasoning_ended` and `reasoning_parser_kwargs` are for AsyncLLM.add_request: whether the
    rule applies from the first token on, and the arguments of the engine core's own reasoning parser.
    `prompt` is vLLM's input for a prompt with media, None for a prompt of tokens only."""

    parsers: tuple[ChoiceParser, ...] = ()
    structured: StructuredOutputsParams | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    prompt: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return further keyword arguments of AsyncLLM.add_request."""
        if self.structured is None:
            return {}
        return {
            "reasoning_ended": self.reasoning_ended,
            "reasoning_parser_kwargs": self.reasoning_parser_kwargs,
        }

    def applied(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments of SamplingParams, as modified by the parsers and the rule."""
        changed = {
            "structured_outputs": self.structured,
            "skip_special_tokens": self.skip_special_tokens,
            "spaces_between_special_tokens": self.spaces_between_special_tokens,
        }
        return params | {name: value for name, value in changed.items() if value is not None}


class MediaPreparer(Protocol):
    """See kvasir_workers.engines.vllm.runtime.media_prompts."""

    async def prompt(self, request: EngineRequest, threads: Executor) -> Any: ...


class Preparer:
    """Prepares legs of one engine. `media` is None for a model of text only."""

    def __init__(self, parsers: Parsers, rules: StructuredRules, media: MediaPreparer | None = None) -> None:
        self._parsers = parsers
        self._rules = rules
        self._media = media
        self._one_with_media = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvasir-prepare")
        self._judged: _Kept[StructuredOutputsParams] = _Kept()
        self._understood: _Kept[Understanding] = _Kept()

    def at_once(self, request: EngineRequest) -> Prepared | None:
        """Return the preparation if it takes microseconds, as for cached options; None otherwise."""
        if request.media or request.continuation is not None or request.sampling.n > _MAX_INLINE_CHOICES:
            return None
        if request.parsing is None:
            rule = request.sampling.structured
            known = None if rule is None else self._judged.get(rule)
            return None if known is None else self._prepared(request, None, known)
        understood = self._understood.get(_way_of_asking(request))
        return None if understood is None else self._prepared(request, understood, understood.structured)

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Raise ValueError with the compiler's message for what vLLM rejects, TimeoutError if it took too
        long, and Busy if others did."""
        begun = threading.Event()

        def work() -> Prepared:
            begun.set()
            return self._work(request)

        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                prepared = await asyncio.get_running_loop().run_in_executor(self._threads, work)
                if not request.media:
                    return prepared
                begun.clear()
                # Decoded media are large, and vLLM processes those of one request at a time.
                async with self._one_with_media:
                    begun.set()
                    return replace(prepared, prompt=await self._with_media(request))
        except TimeoutError:
            if begun.is_set():
                raise
            raise Busy("the worker is busy with tools, schemas and media of other requests") from None

    def close(self) -> None:
        """Do not wait: a thread may be in a compiler that does not end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _with_media(self, request: EngineRequest) -> Any:
        if self._media is None:
            raise ValueError("the model of this worker takes text only")
        return await self._media.prompt(request, self._threads)

    def _work(self, request: EngineRequest) -> Prepared:
        if request.leg is Leg.PREFILL:
            return Prepared()
        rule = request.sampling.structured
        structured = None if rule is None else structured_params(rule)
        understood = None
        if request.parsing is not None:
            way = _way_of_asking(request)
            understood = self._understood.get(way)
            if understood is None:
                made = self._parsers.understand(request.parsing, request.sampling, structured)
                understood = replace(made, structured=self._vetted(made.structured, request.parsing.tools))
                self._understood.keep(way, understood, len(request.parsing.tools) + _rule_bytes(rule))
            structured = understood.structured
        elif rule is not None:
            known = self._judged.get(rule)
            structured = known if known is not None else self._vetted(structured)
            if known is None and structured is not None:
                self._judged.keep(rule, structured, _rule_bytes(rule))
        return self._prepared(request, understood, structured)

    def _vetted(
        self, params: StructuredOutputsParams | None, tools: str = ""
    ) -> StructuredOutputsParams | None:
        """Return what the engine core compiles. Raise ValueError, with the field of the tool that is at
        fault, if it is one of `tools`."""
        try:
            return None if params is None else self._rules.vetted(params)
        except ValueError:
            for number, tool in enumerate(json.loads(tools) if tools else ()):
                if schema := tool["function"].get("parameters"):
                    self._check_parameters(schema, f"tools[{number}].function.parameters")
            raise

    def _check_parameters(self, schema: dict[str, Any], field: str) -> None:
        try:
            self._rules.vetted(StructuredOutputsParams(json=schema))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error

    def _prepared(
        self,
        request: EngineRequest,
        understood: Understanding | None,
        structured: StructuredOutputsParams | None,
    ) -> Prepared:
        if understood is None:
            # No reasoning is parsed, so the rule must not wait for its end.
            return Prepared(structured=structured, reasoning_ended=True)
        there = continued_tokens(request)
        tokens = request.tokens.tolist()
        prompt = tokens[: len(tokens) - there]
        choices = tuple(self._parsers.choice(understood, prompt) for _ in range(request.sampling.n))
        prepared = Prepared(
            parsers=choices,
            structured=structured,
            skip_special_tokens=understood.skip_special_tokens,
            spaces_between_special_tokens=understood.spaces_between_special_tokens,
        )
        if structured is not None:
            prepared = replace(
                prepared,
                reasoning_ended=choices[0].reasoning_ended(prompt),
                reasoning_parser_kwargs=(
                    {"chat_template_kwargs": understood.template_kwargs} if choices[0].reasons else None
                ),
            )
        if request.continuation is not None:
            sampling = request.sampling
            params = SamplingParams(
                stop=list(sampling.stop),
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                skip_special_tokens=understood.skip_special_tokens,
                spaces_between_special_tokens=understood.spaces_between_special_tokens,
            )
            steps = continuation.replay(self._parsers.tokenizer, params, prompt, tokens[len(prompt) :])
            choices[0].prime(steps, request.continuation.text_length)
        return prepared


class _Kept(Generic[T]):
    """The latest results, bounded in number and in the bytes of their inputs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, value: T, size: int) -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = value, size
            self._bytes += size
            while len(self._entries) > _KEPT or self._bytes > _KEPT_BYTES:
                _, (_, gone) = self._entries.popitem(last=False)
                self._bytes -= gone


def _way_of_asking(request: EngineRequest) -> Hashable:
    sampling = request.sampling
    return (
        request.parsing,
        sampling.structured,
        sampling.skip_special_tokens,
        sampling.spaces_between_special_tokens,
    )


def _rule_bytes(rule: StructuredOutput | None) -> int:
    return 0 if rule is None else len(rule.spec)
