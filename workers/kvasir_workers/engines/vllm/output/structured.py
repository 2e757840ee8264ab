"""Output rules in vLLM's form, validated before the engine has them.

vLLM validates a rule when a request is added: on the event loop, where a large schema would stop every stream
of the worker meanwhile. Here the same code of vLLM validates it in a thread, and is skipped later
(`VettedParams`). The engine core compiles it, also in a thread.

These private parts of vLLM are used, and tests/contract/test_vllm_structured_hooks.py checks each of them:

    SamplingParams._validate_structured_outputs    called by verify(); rewrites the rule, selects the compiler
    StructuredOutputsParams._backend               the compiler: the engine core reads it (core_grammars.py)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from kvasir.core.requests import Constraint, StructuredOutput

MAX_SPEC_BYTES = 65_536
"""Limit of a rule as sent by its client, and of what a tool parser makes of tools. A schema of this size may
take seconds of a core to compile."""

MAX_CHOICES = 1024

_MAX_CAUSES = 4
_MAX_WORDS = 1000

FAULTS = (VLLMClientError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError)
"""Exceptions of vLLM, its compilers and parsers for invalid client input."""

_FIELDS = {
    Constraint.JSON_SCHEMA: "json",
    Constraint.REGEX: "regex",
    Constraint.GRAMMAR: "grammar",
    Constraint.STRUCTURAL_TAG: "structural_tag",
}


class VettedParams(SamplingParams):  # type: ignore[misc]  # vLLM ships no type information here
    """Sampling parameters whose rule was already validated."""

    def _validate_structured_outputs(self, *_args: Any) -> None:
        """See the module."""


def structured_params(structured: StructuredOutput) -> StructuredOutputsParams:
    """Return the rule in vLLM's form. Raise ValueError if it is too large or malformed."""
    if structured.constraint is Constraint.JSON_OBJECT:
        return StructuredOutputsParams(json_object=True)
    size = len(structured.spec.encode())
    if size > MAX_SPEC_BYTES:
        raise ValueError(f"the {_name(structured)} has {size} bytes; at most {MAX_SPEC_BYTES} are compiled")
    if structured.constraint is not Constraint.CHOICE:
        return StructuredOutputsParams(**{_FIELDS[structured.constraint]: structured.spec})
    try:
        choices = json.loads(structured.spec)
    except ValueError as error:
        raise ValueError(f"the choices are not a JSON array: {error}") from error
    if not isinstance(choices, list) or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("the choices are not an array of strings that are not empty")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(
            f"there are {len(choices)} choices; at least one and at most {MAX_CHOICES} are supported"
        )
    return StructuredOutputsParams(choice=choices)


class StructuredRules:
    """Validates rules for one engine: `compilers` are tried in order, with vLLM's `config` otherwise."""

    def __init__(
        self, config: StructuredOutputsConfig, compilers: Sequence[str], *, model_config: Any, tokenizer: Any
    ) -> None:
        self._configs = {name: replace(config, backend=name) for name in compilers}
        # Only this one supports all tags that tool parsers write.
        self._tags = replace(config, backend="xgrammar")
        self._model_config = model_config
        self._tokenizer = tokenizer

    def vetted(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return what the engine core compiles, with the name of the compiler. Takes microseconds to seconds:
        do not call it on an event loop. Raise ValueError with the compilers' messages."""
        if params.structural_tag is None:
            configs = list(self._configs.values())
            if is_mistral_tokenizer(self._tokenizer) and grammar_is_likely_lark(params.grammar or ""):
                # The form of Mistral's tool parser; the first compiler supports no special token of these
                # tokenizers.
                configs.reverse()
            return self._first(params, configs)
        size = len(params.structural_tag.encode())
        if size > MAX_SPEC_BYTES:
            raise ValueError(
                f"the tools make a grammar of {size} bytes; at most {MAX_SPEC_BYTES} are compiled"
            )
        if self._tags.disable_any_whitespace:
            params = replace(params, structural_tag=_compact(params.structural_tag))
        return self._first(params, [self._tags])

    def _first(
        self, params: StructuredOutputsParams, configs: Sequence[StructuredOutputsConfig]
    ) -> StructuredOutputsParams:
        judged = SamplingParams(structured_outputs=copy.copy(params))
        try:
            judged._validate_structured_outputs(self._model_config, configs[0], self._tokenizer)
        except FAULTS as error:
            if len(configs) > 1:
                # The next compiler may support what this one does not.
                return self._first(params, configs[1:])
            raise ValueError(words(error)) from error
        return judged.structured_outputs


def _compact(tag: str) -> str:
    """Return `tag` with the least white space that tags can require: one character between the parts of JSON.
    Raise ValueError if it is not JSON."""
    whole = json.loads(tag)
    formats = [whole.get("format")] if isinstance(whole, dict) else []
    while formats:
        part = formats.pop()
        if isinstance(part, list):
            formats += part
        elif isinstance(part, dict) and part.get("type") == "json_schema":
            part["max_whitespace_cnt"] = part.get("max_whitespace_cnt") or 1
        elif isinstance(part, dict):
            formats += part.values()
    return json.dumps(whole)


def words(error: BaseException) -> str:
    """Return all messages of an error, from vLLM's summary down to the compiler's, each once."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(said) < _MAX_CAUSES:
        text = " ".join(_text(cause).split())
        if text and not any(text in other for other in said):
            said.append(text)
        cause = cause.__cause__ or cause.__context__
    return ": ".join(said)[:_MAX_WORDS] or type(error).__name__


def _text(error: BaseException) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)


def _name(structured: StructuredOutput) -> str:
    return structured.constraint.value.replace("_", " ")
