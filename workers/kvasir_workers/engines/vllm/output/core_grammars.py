"""Kvasir's extension of vLLM's structured outputs, in the engine core.

vLLM compiles every rule with the compiler of the engine's first rule, although its front may have chosen
another one for a schema that the first does not fully support: such a schema would then be enforced only in
part, silently. Here each request gets the compiler that its rule was validated for. A grammar accepts
another worker's output first, so that a constrained stream continues where it stopped. Each has a budget of
time, so that a request cannot delay the others. And near `max_tokens` its output is completed (closing.py).

vLLM's structured output manager imports this module by name when it is created (`reasoning_parser_plugin` of
its configuration), in the process of the engine core. These of its private parts are used, and
tests/contract/test_vllm_structured_hooks.py checks each of them:

    StructuredOutputManager._create_grammar(request)    replaced; runs in the manager's threads
    StructuredOutputManager.backend, .accept_tokens, .tokenizer, .vllm_config
    StructuredOutputRequest(params, _grammar, reasoning_ended, reasoning_parser_kwargs),
        .structured_output_key
    StructuredOutputsParams._backend
    StructuredOutputBackend.allocate_token_bitmask(rows)
    Request.max_tokens, .num_output_tokens
    Request.stop_reason                                 sent to the front with the last output
    SamplingParams.eos_token_id, .all_stop_token_ids
    VllmConfig.additional_config                        which has CUT_OFF where outputs are not completed
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvasir_workers.engines.vllm.output.closing import SHORTENED, ClosingGrammar, ClosingVocabulary
from kvasir_workers.engines.vllm.output.continuation import ARGUMENT
from kvasir_workers.engines.vllm.output.grammar_budget import (
    TOO_COSTLY,
    BudgetedGrammar,
    CallCost,
    GrammarBudget,
    GrammarPool,
)
from kvasir_workers.engines.vllm.setup.arguments import CUT_OFF

_BACKENDS: dict[str, Any] = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
_NAMES = {kind: name for name, kind in _BACKENDS.items()}
_MAKING = threading.Lock()
MAX_COSTS = 1024
MadeT = TypeVar("MadeT")


def install() -> None:
    """Make every manager of this process create its grammars here. Idempotent."""
    if not isinstance(StructuredOutputManager._create_grammar, _Created):
        StructuredOutputManager._create_grammar = _Created(StructuredOutputManager._create_grammar)


class _Created:
    """Replaces the manager's method, and binds as one."""

    def __init__(self, create: Any) -> None:
        self._create = create

    def __get__(self, manager: Any, owner: Any = None) -> Any:
        return self if manager is None else partial(self._grammar, manager)

    def _grammar(self, manager: Any, request: Any) -> Any:
        """Return the request's grammar, advanced over the existing output. An exception ends only the
        request."""
        grammar = BudgetedGrammar(
            _completed(manager, request, self._compiled(manager, request)),
            GrammarBudget(),
            cpu_s=time.thread_time,
            end=partial(setattr, request, "stop_reason", TOO_COSTLY),
            cost=_cost(manager, request.structured_output_request.structured_output_key),
        )
        said = (request.sampling_params.extra_args or {}).get(ARGUMENT)
        if said is not None:
            _advance(manager, request, grammar, said[0])
        grammar.pool = _made_once(manager, "kvasir_grammar_pool", partial(GrammarPool, time.monotonic))
        return grammar

    def _compiled(self, manager: Any, request: Any) -> Any:
        wanted = request.sampling_params.structured_outputs._backend
        if wanted == _NAMES.get(type(manager.backend), wanted) or wanted not in _BACKENDS:
            return self._create(manager, request)
        kind, spec = request.structured_output_request.structured_output_key
        stops = request.sampling_params.all_stop_token_ids
        return _other_backend(manager, wanted).compile_grammar(kind, spec, stop_token_ids=stops)


def _completed(manager: Any, request: Any, grammar: Any) -> Any:
    """Return `grammar`, completed before the request's limit unless its sampling may exclude the tokens for
    that."""
    params = request.sampling_params
    excludes = params.ignore_eos or params.min_tokens or params.allowed_token_ids or params.bad_words
    if excludes or manager.vllm_config.additional_config.get(CUT_OFF):
        return grammar
    first = params.eos_token_id
    others = sorted(params.all_stop_token_ids - {first})
    return ClosingGrammar(
        grammar,
        _made_once(manager, "kvasir_vocabulary", partial(ClosingVocabulary, manager.tokenizer)),
        limit=request.max_tokens,
        produced=lambda: int(request.num_output_tokens),
        stops=others if first is None else [first, *others],
        allocate=partial(manager.backend.allocate_token_bitmask, 1),
        cpu_s=time.thread_time,
        shortened=partial(setattr, request, "stop_reason", SHORTENED),
    )


def _made_once(manager: Any, name: str, make: Callable[[], MadeT]) -> MadeT:
    """Return what all grammars of a manager share, kept there under a name."""
    with _MAKING:
        made: MadeT | None = manager.__dict__.get(name)
        if made is None:
            made = manager.__dict__[name] = make()
        return made


def _cost(manager: Any, rule: Any) -> CallCost:
    """Return what is known of the cost of a rule; of the last MAX_COSTS only."""
    with _MAKING:
        costs: OrderedDict[Any, CallCost] = manager.__dict__.setdefault("kvasir_grammar_costs", OrderedDict())
        found = costs.setdefault(rule, CallCost())
        costs.move_to_end(rule)
        if len(costs) > MAX_COSTS:
            costs.popitem(last=False)
        return found


@dataclass
class _Past:
    """A request as the lost worker's engine core had it, while its output grew."""

    request_id: str
    prompt_token_ids: list[int]
    structured_output_request: Any
    all_token_ids: list[int] = field(default_factory=list)
    use_structured_output: bool = True


def _advance(manager: Any, request: Any, grammar: BudgetedGrammar, count: int) -> None:
    """Make `grammar` accept the last `count` tokens of the request's prompt, as if each had been generated
    here. Raise ValueError if it rejects one. If they exceed its budget, the scheduler ends the request at its
    next token."""
    now = request.structured_output_request
    then = StructuredOutputRequest(
        now.params,
        _grammar=grammar,
        reasoning_ended=now.reasoning_ended,
        reasoning_parser_kwargs=now.reasoning_parser_kwargs,
    )
    prompt = list(request.prompt_token_ids[:-count])
    past = _Past(request.request_id, prompt, then, list(prompt))
    for token in request.prompt_token_ids[-count:]:
        past.all_token_ids.append(token)
        if not manager.accept_tokens(past, [token]):
            if grammar.budget.exceeded:
                break
            raise ValueError(f"token {token} of the existing output does not follow the request's grammar")
    # Not read before this grammar is complete.
    now.reasoning_ended = then.reasoning_ended


def _other_backend(manager: Any, name: str) -> Any:
    """Return another backend beside the manager's own. Raise ValueError if their masks do not fit into one
    tensor."""
    with _MAKING:
        others = manager.__dict__.setdefault("kvasir_backends", {})
        if name not in others:
            made = _BACKENDS[name](
                manager.vllm_config,
                tokenizer=manager.tokenizer,
                vocab_size=manager.vllm_config.model_config.get_vocab_size(),
            )
            widths = [each.allocate_token_bitmask(1).shape for each in (manager.backend, made)]
            if widths[0] != widths[1]:
                raise ValueError(f"{name} has masks of {widths[1]} words, but this engine's have {widths[0]}")
            others[name] = made
        return others[name]


install()
