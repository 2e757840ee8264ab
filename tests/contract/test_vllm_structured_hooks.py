"""Internals of vLLM that structured.py and core_grammars.py depend on: rules are checked outside the event
loop, each compiled by its backend, and advanced over existing output.

vLLM's own manager and scheduler-side request, over the real tokenizer; no engine runs.
"""

from __future__ import annotations

import inspect
import json
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec
from kvasir.core.requests import Constraint, EngineRequest, Role, Sampling, StructuredOutput, token_ids
from kvasir_workers.engines.vllm.setup.arguments import CORE_GRAMMARS, compilers, engine_arguments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens"),
]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SEVENS = {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 99}
PROMPT = [300, 301, 302]


@dataclass
class Core:
    """What vLLM's engine core does with rules, and what its front does before."""

    config: Any
    rules: Any
    tokenizer: Any

    def manager(self) -> Any:
        from vllm.v1.structured_output import StructuredOutputManager

        return StructuredOutputManager(self.config)

    def judged(self, constraint: Constraint, spec: Any) -> Any:
        from kvasir_workers.engines.vllm.output.structured import structured_params

        text = spec if isinstance(spec, str) else json.dumps(spec)
        return self.rules.vetted(structured_params(StructuredOutput(constraint, text)))

    def request(self, rule: Any, tokens: list[int], there: int = 0, *, ended: bool | None = True) -> Any:
        """As the scheduler has it; the last `there` of its tokens are output of another worker."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        extra = {"kvasir_continuation": [there, 0]} if there else None
        params = SamplingParams(max_tokens=50, structured_outputs=rule, extra_args=extra)
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        return Request("r", tokens, params, None, reasoning_ended=ended)

    def grammar(self, manager: Any, request: Any) -> Any:
        """Raises what its compilation raised."""
        manager.grammar_init(request)
        made = request.structured_output_request._grammar
        return made.result(timeout=60) if isinstance(made, Future) else made

    def mask(self, manager: Any, request: Any) -> list[int]:
        masks = manager.grammar_bitmask({"r": request}, ["r"], {})
        return [int(word) for word in masks[0]]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def core(runtime: Any) -> Core:
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tokenizers import get_tokenizer

    from kvasir_workers.engines.vllm.output.structured import StructuredRules

    path = str(resolve_model("kvasir-tiny"))
    deployment = Deployment(disaggregation="never", pools=(PoolSpec(name="both", role=Role.BOTH),))
    made = engine_arguments(deployment, deployment.pools[0], model_path=path, platform="cpu")
    made["structured_outputs_config"] = StructuredOutputsConfig(**made["structured_outputs_config"])
    config = AsyncEngineArgs(**made).create_engine_config()
    tokenizer = get_tokenizer(path)
    rules = StructuredRules(
        config.structured_outputs_config,
        compilers(EngineSpec()),
        model_config=config.model_config,
        tokenizer=tokenizer,
    )
    return Core(config, rules, tokenizer)


@pytest.mark.parametrize(
    ("constraint", "spec", "compiler", "output"),
    [
        (Constraint.JSON_OBJECT, "", "xgrammar", '{"a":[1, {"b":null}]}'),
        (Constraint.JSON_SCHEMA, PERSON, "xgrammar", '{"name":"Ørsted 😀","age":41}'),
        (Constraint.JSON_SCHEMA, SEVENS, "guidance", "84"),
        (Constraint.REGEX, "(yes|no), [0-9]{4}", "xgrammar", "no, 1984"),
        (Constraint.CHOICE, ["rain and snow", "rain and sun"], "xgrammar", "rain and sun"),
        (Constraint.GRAMMAR, 'root ::= "a" ("b" | "c")*', "xgrammar", "abccb"),
    ],
)
def test_a_grammar_goes_on_over_output_that_is_there_as_if_it_had_made_it(
    core: Core, constraint: Constraint, spec: Any, compiler: str, output: str
) -> None:
    rule = core.judged(constraint, spec)
    assert rule._backend == compiler
    manager = core.manager()
    tokens = core.encode(output)
    whole = core.request(rule, list(PROMPT))
    core.grammar(manager, whole)
    for cut, token in enumerate(tokens):
        whole.append_output_token_ids([token])
        assert manager.accept_tokens(whole, [token])
        there = [*PROMPT, *tokens[: cut + 1]]
        continued = core.request(rule, there, cut + 1)
        core.grammar(manager, continued)
        assert core.mask(manager, continued) == core.mask(manager, whole), f"after {cut + 1} tokens"
    manager.clear_backend()


def test_each_rule_has_the_compiler_that_it_was_judged_for(core: Core) -> None:
    person, sevens = core.judged(Constraint.JSON_SCHEMA, PERSON), core.judged(Constraint.JSON_SCHEMA, SEVENS)
    for first, second in ((person, sevens), (sevens, person)):
        manager = core.manager()
        made = [core.grammar(manager, core.request(rule, list(PROMPT))) for rule in (first, second, first)]
        # What a compiler makes is wrapped: to complete it, and to pay for its calls.
        kinds = [type(each._grammar._grammar).__name__ for each in made]
        assert kinds[0] == kinds[2] != kinds[1]
        manager.clear_backend()


def test_output_that_does_not_follow_its_rule_ends_the_request_alone(core: Core) -> None:
    manager = core.manager()
    rule = core.judged(Constraint.REGEX, "[0-9]+")
    with pytest.raises(ValueError, match="does not follow"):
        core.grammar(manager, core.request(rule, [*PROMPT, *core.encode("12a")], 3))
    assert core.grammar(manager, core.request(rule, [*PROMPT, *core.encode("12")], 2)) is not None
    manager.clear_backend()


def test_a_rule_that_waits_for_reasoning_goes_on_waiting_or_has_begun(core: Core) -> None:
    mark = 302

    class Reasoner:
        """Whose reasoning ends with `mark`."""

        def is_reasoning_end_streaming(self, ids: list[int], delta: list[int]) -> bool:
            return mark in delta

    manager = core.manager()
    manager.reasoner_cls = lambda **_: Reasoner()
    rule = core.judged(Constraint.REGEX, "[0-9]{4}")
    prompt = [310, 311]
    thought = core.request(rule, [*prompt, 400, 401], 2, ended=False)
    core.grammar(manager, thought)
    assert thought.structured_output_request.reasoning_ended is False
    digits = core.encode("12")
    ended = core.request(rule, [*prompt, 400, mark, *digits], 2 + len(digits), ended=False)
    core.grammar(manager, ended)
    assert ended.structured_output_request.reasoning_ended is True
    whole = core.request(rule, list(prompt), ended=True)
    core.grammar(manager, whole)
    for token in digits:
        manager.accept_tokens(whole, [token])
    assert core.mask(manager, ended) == core.mask(manager, whole)
    manager.clear_backend()


def test_an_output_is_complete_at_its_limit(core: Core) -> None:
    """The model writes the first word that the mask allows, and ends nothing by itself."""
    endless = {"type": "array", "items": PERSON, "minItems": 1}
    for constraint, spec in ((Constraint.JSON_SCHEMA, endless), (Constraint.JSON_OBJECT, "")):
        manager = core.manager()
        request = core.request(core.judged(constraint, spec), list(PROMPT))
        core.grammar(manager, request)
        words = core.encode(" and sea")
        while request.num_output_tokens < 50:
            mask = core.mask(manager, request)
            allowed = [token for token in range(len(core.tokenizer)) if mask[token >> 5] >> (token & 31) & 1]
            token = next((word for word in words if word in allowed), allowed[-1])
            request.append_output_token_ids([token])
            assert manager.accept_tokens(request, [token])
            if token == core.tokenizer.eos_token_id:
                break
        *text, last = request.output_token_ids
        assert last == core.tokenizer.eos_token_id
        assert request.stop_reason == "max_tokens"
        jsonschema.validate(json.loads(core.tokenizer.decode(text)), spec or {"type": "object"})
        manager.clear_backend()


def test_a_grammar_that_takes_too_long_ends_its_request_with_the_reason(core: Core) -> None:
    manager = core.manager()
    rule = core.judged(Constraint.REGEX, "(a{0,20}){0,20}b{0,500}")
    request = core.request(rule, list(PROMPT))
    core.grammar(manager, request)
    (token,) = core.encode("a")
    accepted = 0
    while accepted < 300:
        core.mask(manager, request)
        request.append_output_token_ids([token])
        if not manager.accept_tokens(request, [token]):
            break
        accepted += 1
    assert accepted < 300
    assert request.stop_reason == "grammar_too_costly"
    there = core.request(rule, [*PROMPT, *[token] * 60], 60)
    core.grammar(manager, there)
    assert not manager.accept_tokens(there, [token]), "output that is there is paid from the same budget"
    assert there.stop_reason == "grammar_too_costly"
    manager.clear_backend()


@pytest.mark.parametrize(
    ("constraint", "spec", "words"),
    [
        (Constraint.JSON_SCHEMA, "[", "Invalid JSON"),
        (Constraint.JSON_SCHEMA, {"type": "nonsense"}, "nonsense"),
        (Constraint.GRAMMAR, "", "empty"),
        (Constraint.REGEX, "(", "."),
        (Constraint.CHOICE, "yes", "not a JSON array"),
        (Constraint.CHOICE, ["", "a"], "not empty"),
        (Constraint.CHOICE, [str(n) for n in range(1025)], "at most 1024"),
        (Constraint.JSON_SCHEMA, {"description": "x" * 66_000}, "at most 65536"),
        (Constraint.STRUCTURAL_TAG, {"a": 1}, "structural tag"),
    ],
)
def test_a_bad_rule_is_refused_in_its_compilers_words(
    core: Core, constraint: Constraint, spec: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        core.judged(constraint, spec)
    assert len(str(refused.value)) <= 1000


def test_a_schema_too_deep_is_refused(core: Core) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        core.judged(Constraint.JSON_SCHEMA, schema)


def test_one_compiler_may_be_chosen(core: Core) -> None:
    from kvasir_workers.engines.vllm.output.structured import StructuredRules, structured_params

    rules = StructuredRules(
        core.config.structured_outputs_config,
        compilers(EngineSpec(structured_outputs="xgrammar")),
        model_config=core.config.model_config,
        tokenizer=core.tokenizer,
    )
    with pytest.raises(ValueError, match="not supported"):
        rules.vetted(structured_params(StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(SEVENS))))


def test_a_judged_rule_is_not_judged_again_when_it_is_added(runtime: Any, core: Core) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    from kvasir_workers.engines.vllm.output.preparing import Prepared

    rule = core.judged(Constraint.CHOICE, ["a", "b"])
    request = EngineRequest("r", token_ids(PROMPT), Sampling(temperature=0.0, max_tokens=4))
    params = runtime.sampling_params(
        request, lease_id="", fence=1, lease_s=1.0, prepared=Prepared(structured=rule)
    )
    processor = InputProcessor(core.config)
    added = processor.process_inputs("r", runtime.prompt(request), params, supported_tasks=("generate",))
    assert added.sampling_params.structured_outputs == rule
    assert added.sampling_params.structured_outputs._backend == "xgrammar"
    params.structured_outputs = replace(rule)
    params.structured_outputs.regex, params.structured_outputs.grammar = "(", None
    processor.process_inputs("r", runtime.prompt(request), params, supported_tasks=("generate",))


def test_tags_leave_little_white_space_where_json_is_to_be_compact(core: Core) -> None:
    from kvasir_workers.engines.vllm.output.structured import StructuredRules, structured_params

    tag = {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": PERSON},
        "end": "</a>",
    }
    several = {"type": "tags_with_separator", "tags": [tag], "separator": "", "at_least_one": True}
    spec = json.dumps({"type": "structural_tag", "format": several})
    roomy = '<a>{"name":  "b", "age": 1}</a>'
    for compact in (False, True):
        config = replace(core.config.structured_outputs_config, disable_any_whitespace=compact)
        rules = StructuredRules(
            config, ("xgrammar",), model_config=core.config.model_config, tokenizer=core.tokenizer
        )
        rule = rules.vetted(structured_params(StructuredOutput(Constraint.STRUCTURAL_TAG, spec)))
        for text, good in ((roomy, not compact), (roomy.replace(":  ", ": "), True)):
            manager = core.manager()
            request = core.request(rule, list(PROMPT))
            core.grammar(manager, request)
            assert all(manager.accept_tokens(request, [token]) for token in core.encode(text)) is good
            manager.clear_backend()


def test_a_judged_rule_reaches_the_core_as_any_other(runtime: Any, core: Core) -> None:
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from kvasir_workers.engines.vllm.output.structured import VettedParams

    rule = core.judged(Constraint.JSON_SCHEMA, SEVENS)
    sent = MsgpackEncoder().encode(VettedParams(max_tokens=3, structured_outputs=rule))
    there = MsgpackDecoder(SamplingParams).decode(sent)
    assert type(there) is SamplingParams
    assert there.structured_outputs == rule
    assert there.structured_outputs._backend == "guidance"


def test_vllm_keeps_the_parts_that_are_replaced_or_read(runtime: Any) -> None:
    from vllm import SamplingParams
    from vllm.v1 import structured_output
    from vllm.v1.structured_output.request import StructuredOutputRequest

    assert "self._validate_structured_outputs(" in inspect.getsource(SamplingParams.verify)
    manager = inspect.getsource(structured_output.StructuredOutputManager)
    for part in (
        "self.executor.submit(self._create_grammar, request)",
        "ReasoningParserManager.import_reasoning_parser(reasoning_parser_plugin)",
        "structured_outputs._backend",
        "self.backend",
        "self.tokenizer",
        "self.vllm_config",
    ):
        assert part in manager, f"StructuredOutputManager lost `{part}`; see core_grammars.py"
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import Request

    stops = inspect.getsource(check_stop)
    for part in ("sampling_params.eos_token_id", "request.num_output_tokens >= request.max_tokens"):
        assert part in stops, f"check_stop lost `{part}`; see core_grammars.py"
    assert "self.max_tokens" in inspect.getsource(Request)
    fields = set(inspect.signature(StructuredOutputRequest).parameters)
    assert {"params", "_grammar", "reasoning_ended", "reasoning_parser_kwargs"} <= fields
    assert CORE_GRAMMARS.rpartition(".")[2] == "core_grammars"
