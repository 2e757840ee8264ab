"""vLLM's own parsers on the worker: they split a model's output into content, reasoning and tool calls.

A parser has the state of one choice. It is created from a request of OpenAI's API, which is built here from
`OutputParsing`, and it may change the engine's parameters: special tokens shown as text, and forced or strict
tool calls as a grammar. vLLM's older parsers reread all of the output at every step: with long outputs they
get several tokens at once, which bounds the cost per token.

These parts of vLLM are used, and tests/contract/test_vllm_parsing_hooks.py checks each of them:

    ParserManager.get_parser(...), Parser(tokenizer, tools, model_config=, chat_template_kwargs=)
    Parser.adjust_request, .set_prompt_token_ids, .is_reasoning_end, .parse_delta, .count_reasoning_tokens,
        .reasoning_parser, .always_adjust_request, ._engine_based
    ChatCompletionRequest.extract_structured_outputs, .resolve_reasoning_ended, .skip_special_tokens,
        .spaces_between_special_tokens
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParser
from vllm.utils.mistral import is_mistral_tokenizer

from kvasir.core.requests import OutputParsing, Sampling, ToolCallDelta
from kvasir_workers.engines.parts import StepParts
from kvasir_workers.engines.vllm.output.structured import FAULTS, words

_log = logging.getLogger(__name__)

_PACE_TOKENS = 4096
"""A parser that rereads all output gets one more token at once for each of this many tokens."""


@dataclass(frozen=True, slots=True)
class Understanding:
    """A set of parsing options in the form that vLLM's parsers need: the request for each step, and the
    resulting engine parameters. Shared by all requests with the same options."""

    request: Any
    parser: type[Any] | None
    template_kwargs: dict[str, Any]
    structured: StructuredOutputsParams | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


class Parsers:
    """The parsers of one engine. Raise ValueError if they do not work with its tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        model_config: Any,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        strictness: str = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.model_config = model_config
        harmony = getattr(getattr(model_config, "hf_config", None), "model_type", "") == "gpt_oss"
        try:
            self._kind = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                model_name=getattr(model_config, "model", None),
                is_harmony=harmony,
                tool_strict_level=strictness,
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ValueError(str(error)) from error
        self._tools = self._kind is not None and self._kind.tool_parser_cls is not None
        reasoning = None if self._kind is None else self._kind.reasoning_parser_cls

        class ForcedCalls(DelegatingParser):  # type: ignore[misc]  # vLLM ships no type information here
            """Forced calls: a grammar makes any model write them as JSON."""

            reasoning_parser_cls = reasoning
            tool_parser_cls = ToolParser

        # Call formats bound neither white space nor output, as JSON's grammar does. Harmony's, Mistral's and
        # those of parsers that do not delegate are kept.
        own = harmony or is_mistral_tokenizer(tokenizer)
        kept = self._tools and (own or not issubclass(self._kind, DelegatingParser))
        self._forced: type[Any] = self._kind if kept else ForcedCalls

    def understand(
        self, parsing: OutputParsing, sampling: Sampling, structured: StructuredOutputsParams | None
    ) -> Understanding:
        """Takes up to milliseconds: do not call it on an event loop. Raise ValueError for what vLLM
        rejects."""
        try:
            return self._understand(parsing, sampling, structured)
        except FAULTS as error:
            raise ValueError(words(error)) from error

    def choice(self, understood: Understanding, prompt: list[int]) -> ChoiceParser:
        """Return the parser of one choice of a request with this prompt."""
        request, parser = understood.request, None
        if understood.parser is not None:
            parser = self._new(understood.parser, request, understood.template_kwargs)
        return ChoiceParser(parser, request, prompt)

    def _understand(
        self, parsing: OutputParsing, sampling: Sampling, structured: StructuredOutputsParams | None
    ) -> Understanding:
        kwargs = json.loads(parsing.template_kwargs) if parsing.template_kwargs else {}
        kind = self._kind
        if parsing.tools and parsing.tool_choice == "auto" and not self._tools:
            raise ValueError(
                "tool_choice auto needs a parser of the model's calls, and the pool has "
                "none: set engine.tool_parser, or force a call by tool_choice required or a name"
            )
        if parsing.tools and parsing.tool_choice not in ("auto", "none"):
            kind = self._forced
        request = _as_vllm(parsing, sampling, structured, kwargs)
        if kind is not None and _adjusts(kind, request):
            request = self._new(kind, request, kwargs).adjust_request(request)
        return Understanding(
            request=request,
            parser=kind,
            template_kwargs=kwargs,
            structured=request.extract_structured_outputs(),
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )

    def _new(self, kind: type[Any], request: Any, kwargs: dict[str, Any]) -> Any:
        return kind(
            self.tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=self.model_config
        )


class ChoiceParser:
    """See kvasir_workers.engines.parts.PartsParser. Without parsers, all text is content."""

    def __init__(self, parser: Any, request: Any, prompt: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt: list[int] | None = prompt
        self._only_call = request.parallel_tool_calls is False
        self._ids: list[int] = []
        self._reasoning_ids = 0
        self._text = ""
        self._fresh: list[int] = []
        self._paced = parser is not None and not parser._engine_based
        if parser is not None:
            parser.set_prompt_token_ids(prompt)

    def take(self, text: str, token_ids: Sequence[int], *, finished: bool) -> StepParts:
        """See PartsParser."""
        self._text += text
        self._fresh += token_ids
        if self._parser is None:
            return self._plain()
        due = len(self._ids) // _PACE_TOKENS if self._paced else 0
        return self._parse(finished) if finished or len(self._fresh) > due else StepParts()

    def reasoning_tokens(self) -> int:
        """See PartsParser."""
        if self._parser is None or self._parser.reasoning_parser is None:
            return self._reasoning_ids
        # Some parsers count from the mark that begins the reasoning, which may be in the prompt.
        return self._parser.count_reasoning_tokens(self._ids) or self._reasoning_ids

    def reasoning_ended(self, prompt: list[int]) -> bool | None:
        """Return whether a grammar applies from the first token of output after `prompt` on; None: vLLM
        decides."""
        ended: bool | None = self._request.resolve_reasoning_ended(self._parser, prompt)
        return ended

    @property
    def reasons(self) -> bool:
        """Whether there is a parser of reasoning."""
        return self._parser is not None and self._parser.reasoning_parser is not None

    def prime(self, steps: Iterable[tuple[int, str]], text_length: int) -> None:
        """Consume what a lost worker consumed: `text_length` characters of `steps`, its tokens, each with the
        text of its step. The remaining text is parsed with the first step here."""
        had = 0
        behind: list[int] = []
        for token, text in steps:
            if not behind and had + len(text) <= text_length:
                had += len(text)
                self.take(text, [token], finished=False)
            else:
                if had < text_length:
                    self._text += text[: text_length - had]
                    had = text_length
                behind.append(token)
        if self._parser is not None and (self._text or self._fresh):
            self._parse(False)
        self._fresh = behind

    def _parse(self, finished: bool) -> StepParts:
        text, fresh = self._text, self._fresh
        try:
            message = self._parser.parse_delta(
                text, fresh, self._request, prompt_token_ids=self._prompt, finished=finished
            )
            parts = self._parts(message, len(text))
        except Exception:  # noqa: BLE001 - parsers raise many types for what models write
            _log.exception("%s failed: the rest of the choice is plain text", type(self._parser).__name__)
            self._ids += fresh
            self._parser = None
            return self._plain()
        self._prompt = None
        self._ids += fresh
        if parts.reasoning and not parts.text and not parts.tool_calls:
            self._reasoning_ids += len(fresh)
        self._text, self._fresh = "", []
        return parts

    def _plain(self) -> StepParts:
        text, self._text, self._fresh = self._text, "", []
        return StepParts(text=text, taken=len(text))

    def _parts(self, message: Any, taken: int) -> StepParts:
        if message is None:
            return StepParts(taken=taken)
        calls: tuple[ToolCallDelta, ...] = ()
        if message.tool_calls:
            calls = tuple(
                _call(each) for each in message.tool_calls if each.index == 0 or not self._only_call
            )
        return StepParts(
            text=message.content or "", reasoning=message.reasoning or "", tool_calls=calls, taken=taken
        )


def _call(made: Any) -> ToolCallDelta:
    function = made.function
    name = (function.name if function is not None else None) or ""
    call_id = made.id or (make_tool_call_id() if name else "")
    arguments = (function.arguments if function is not None else None) or ""
    return ToolCallDelta(index=made.index, call_id=call_id, name=name, arguments=arguments)


def _adjusts(kind: type[Any], request: Any) -> bool:
    """Whether vLLM's own front would call the parser."""
    return bool(
        kind.always_adjust_request or kind.reasoning_parser_cls is not None or request.tool_choice != "none"
    )


def _as_vllm(
    parsing: OutputParsing,
    sampling: Sampling,
    structured: StructuredOutputsParams | None,
    kwargs: dict[str, Any],
) -> Any:
    """Return the request that vLLM's own front would have. Raise ValueError (pydantic's) for an invalid
    one."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}],
        "include_reasoning": parsing.reasoning,
        "parallel_tool_calls": parsing.parallel_tool_calls,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
        "chat_template_kwargs": kwargs,
    }
    if structured is not None:
        fields["structured_outputs"] = structured
    if parsing.tools:
        fields["tools"] = json.loads(parsing.tools)
        fields["tool_choice"] = parsing.tool_choice
        if parsing.function:
            fields["tool_choice"] = {"type": "function", "function": {"name": parsing.function}}
    return ChatCompletionRequest(**fields)
