"""Every field of a body reaches the engine with vLLM's meaning, and selects the response format."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from kvasir.checkpoint.sampling_defaults import NEUTRAL, SamplingDefaults
from kvasir.config.spec.deployment import ApiSpec, Deployment, PoolSpec
from kvasir.core.errors import RequestError
from kvasir.core.requests import Constraint, Role, Sampling, StructuredOutput, token_ids
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities, model_capabilities
from kvasir_platform.gateway.openai.calls import (
    Call,
    Truncation,
    chat_call,
    completion_call,
    fit_context,
    truncated,
)
from kvasir_platform.gateway.openai.schema.decode import (
    decode_chat,
    decode_completion,
    decode_embedding,
    decode_tokenize,
)
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall, embedding_call, tokenize_call
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
ALL = ModelCapabilities(embeds=True, tools=True, reasoning=True)
SHOW_ALL = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}{{ reasoning_effort }}"
)
TEMPLATE = ChatTemplate(SHOW_ALL, {})
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
COMPACT = '{"type":"object","properties":{"größe":{"type":"integer"}}}'


def chat(capabilities: ModelCapabilities = ALL, **body: Any) -> Call:
    whole = {"model": "m", "messages": USER, **body}
    return chat_call(decode_chat(json.dumps(whole).encode()), TEMPLATE, 100, capabilities)


def text(**body: Any) -> Call:
    whole = {"model": "m", "prompt": "hi", **body}
    return completion_call(decode_completion(json.dumps(whole).encode()), 100, ALL)


DEFAULTS = SamplingDefaults(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.05,
)


def by_a_model_with_defaults(**body: Any) -> list[Sampling]:
    """Both kinds of request."""
    whole = {"model": "m", "messages": USER, **body}
    calls = [chat_call(decode_chat(json.dumps(whole).encode()), TEMPLATE, 100, ALL, DEFAULTS)]
    whole = {"model": "m", "prompt": "hi", **body}
    calls.append(completion_call(decode_completion(json.dumps(whole).encode()), 100, ALL, DEFAULTS))
    return [call.sampling for call in calls]


def test_what_a_request_leaves_out_is_the_models_default() -> None:
    for sampling in by_a_model_with_defaults():
        for name in DEFAULTS.__slots__:
            assert getattr(sampling, name) == getattr(DEFAULTS, name), name


def test_what_a_request_sets_is_not_the_models_default() -> None:
    neutral = {name: getattr(NEUTRAL, name) for name in NEUTRAL.__slots__}
    for sampling in by_a_model_with_defaults(**neutral | {"temperature": 0.0, "top_k": -1}):
        assert {name: getattr(sampling, name) for name in neutral} == neutral | {"temperature": 0.0}


@pytest.mark.parametrize("make", [chat, text])
def test_every_sampling_field_reaches_the_engine(make: Any) -> None:
    call = make(
        max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, n=3, best_of=3, seed=-4,
        stop=["a", "b"], stop_token_ids=[1], include_stop_str_in_output=True, ignore_eos=True,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"3": -1},
        allowed_token_ids=[4, 5], bad_words=["no", " way"], prompt_logprobs=2, thinking_token_budget=9,
        skip_special_tokens=False, spaces_between_special_tokens=False,
    )  # fmt: skip
    assert call.sampling == Sampling(
        max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, n=3, seed=-4,
        stop=("a", "b"), stop_token_ids=(1,), include_stop_str_in_output=True, ignore_eos=True,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias=((3, -1.0),),
        allowed_token_ids=(4, 5), bad_words=("no", " way"), prompt_logprobs=2, thinking_tokens=9,
        skip_special_tokens=False, spaces_between_special_tokens=False,
    )  # fmt: skip
    assert call.answer_prompt_logprobs == 2


@pytest.mark.parametrize("make", [chat, text])
def test_what_nobody_says_is_vllms_default(make: Any) -> None:
    call = make()
    assert call.sampling == Sampling()
    assert call.parsing is None or make is chat
    assert (call.priority, call.truncation, call.echo, call.prompt_only) == (0, None, False, False)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput(Constraint.JSON_OBJECT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutput(Constraint.JSON_SCHEMA, COMPACT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(Constraint.JSON_SCHEMA, COMPACT)),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA, indent=2)}},
            StructuredOutput(Constraint.JSON_SCHEMA, COMPACT),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(Constraint.JSON_SCHEMA, COMPACT)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(Constraint.REGEX, "a+")),
        ({"guided_regex": "a+"}, StructuredOutput(Constraint.REGEX, "a+")),
        (
            {"structured_outputs": {"choice": ["ja", "nö"]}},
            StructuredOutput(Constraint.CHOICE, '["ja","nö"]'),
        ),
        ({"guided_choice": ["ja", "nö"]}, StructuredOutput(Constraint.CHOICE, '["ja","nö"]')),
        (
            {"structured_outputs": {"grammar": "root ::= 'a'"}},
            StructuredOutput(Constraint.GRAMMAR, "root ::= 'a'"),
        ),
        ({"guided_grammar": "root ::= 'a'"}, StructuredOutput(Constraint.GRAMMAR, "root ::= 'a'")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(Constraint.JSON_OBJECT)),
        (
            {"structured_outputs": {"structural_tag": '{ "format": {} }'}},
            StructuredOutput(Constraint.STRUCTURAL_TAG, '{"format":{}}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuredOutput(
                Constraint.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}'
            ),
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
                    "triggers": ["<a"],
                }
            },
            StructuredOutput(
                Constraint.STRUCTURAL_TAG,
                '{"type":"structural_tag","structures":[{"begin":"<a>","end":"</a>","schema":{}}],'
                '"triggers":["<a"]}',
            ),
        ),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, StructuredOutput(Constraint.REGEX, "a")),
    ],
)
@pytest.mark.parametrize("make", [chat, text])
def test_each_way_to_set_a_rule_means_the_same(
    make: Any, body: dict[str, Any], rule: StructuredOutput
) -> None:
    assert make(**body).sampling.structured == rule


def test_echo_asks_for_the_prompts_logprobs_and_may_want_nothing_else() -> None:
    call = text(echo=True, max_tokens=0, logprobs=1)
    assert (call.echo, call.prompt_only, call.answer_logprobs) == (True, True, 1)
    assert (call.sampling.max_tokens, call.sampling.prompt_logprobs) == (1, 1)
    assert call.answer_prompt_logprobs is None
    assert text(logprobs=1).sampling.prompt_logprobs is None
    assert text(echo=True, stream=True, logprobs=0).sampling.prompt_logprobs == 0


def test_options_of_the_answer_are_kept() -> None:
    call = chat(
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        logprobs=True,
        top_logprobs=3,
        priority=-5,
        cache_salt="s",
        max_tokens=9,
        max_completion_tokens=4,
    )
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)
    assert (call.return_token_ids, call.tokens_as_ids, call.answer_logprobs) == (True, True, 3)
    assert (call.priority, call.salt, call.sampling.max_tokens) == (-5, "s", 4)
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


def test_the_template_is_told_how_to_render() -> None:
    def prompt(**body: Any) -> object:
        return chat(**body).prompts[0]

    assert prompt() == "[user:hi]>"
    assert prompt(add_generation_prompt=False) == "[user:hi]"
    assert prompt(continue_final_message=True) == "[user:hi"
    assert prompt(documents=[{"text": "d"}]) == "[user:hi](d)>"
    assert prompt(reasoning_effort="high") == "[user:hi]>Truehigh"
    assert prompt(reasoning_effort="none") == "[user:hi]>Falsenone"
    mine = {"enable_thinking": False}
    assert prompt(reasoning_effort="high", chat_template_kwargs=mine) == "[user:hi]>Falsehigh"
    assert prompt(messages=[{"role": "developer", "content": "d"}, *USER]) == "[system:d][user:hi]>"


def test_a_clients_template_runs_only_where_it_is_trusted() -> None:
    theirs = "<{{ messages[0].content }}>"
    with pytest.raises(RequestError, match="trust_chat_templates"):
        chat(chat_template=theirs)
    trusted = ModelCapabilities(client_templates=True)
    assert chat(trusted, chat_template=theirs).prompts == ("<hi>",)
    with pytest.raises(RequestError) as caught:
        chat(trusted, chat_template="{% if %}")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "chat_template")


def test_documents_are_refused_where_the_template_shows_none() -> None:
    body = decode_chat(json.dumps({"model": "m", "messages": USER, "documents": [{"text": "d"}]}).encode())
    with pytest.raises(RequestError) as caught:
        chat_call(body, ChatTemplate("{{ messages }}", {}), 100, ALL)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "documents")


def test_special_tokens_are_added_to_texts_and_not_to_chats() -> None:
    assert text().add_special_tokens
    assert not text(add_special_tokens=False).add_special_tokens
    assert not chat().add_special_tokens
    assert chat(add_special_tokens=True).add_special_tokens


@pytest.mark.parametrize(
    ("truncation", "output", "kept"),
    [
        (None, 4, range(20)),
        (Truncation(30), 4, range(20)),
        (Truncation(5), 4, range(15, 20)),
        (Truncation(5, keep_start=True), 4, range(5)),
        (Truncation(-1), 4, range(20)),
        (Truncation(-1), 20, range(8, 20)),
        (Truncation(-1, keep_start=True), 31, range(1)),
        (Truncation(-1, keep_start=True), 99, range(1)),
    ],
)
def test_a_prompt_is_cut_to_what_is_asked_for(
    truncation: Truncation | None, output: int, kept: range
) -> None:
    assert list(truncated(token_ids(range(20)), truncation, 32, output)) == list(kept)


def test_a_cut_cannot_be_longer_than_the_context() -> None:
    with pytest.raises(RequestError) as caught:
        truncated(token_ids(range(20)), Truncation(33), 32)
    assert caught.value.param == "truncate_prompt_tokens"
    assert chat(truncate_prompt_tokens=3, truncation_side="right").truncation == Truncation(3, True)
    assert text(truncate_prompt_tokens=-1).truncation == Truncation(-1)


def test_prompt_logprobs_are_bounded_by_how_many_they_are() -> None:
    sampling = Sampling(prompt_logprobs=20)
    assert fit_context(sampling, 6000, 200_000, 8, "prompt").max_tokens == 8
    with pytest.raises(RequestError, match="131072") as caught:
        fit_context(sampling, 6300, 200_000, 8, "prompt")
    assert caught.value.param == "prompt_logprobs"


def test_thinking_budgets_need_a_reasoning_parser() -> None:
    with pytest.raises(RequestError, match=r"engine\.reasoning_parser") as caught:
        chat(ModelCapabilities(), thinking_token_budget=5)
    assert caught.value.code == "unsupported_parameter"
    assert chat(thinking_token_budget=-1).sampling.thinking_tokens is None
    assert chat(thinking_token_budget=0).sampling.thinking_tokens == 0


def test_a_body_names_its_session_in_one_of_three_ways() -> None:
    def session(**body: Any) -> str | None:
        whole = {"model": "m", "messages": USER, **body}
        return decode_chat(json.dumps(whole).encode()).session

    assert session(user="u", prompt_cache_key="p", session_id="s") == "s"
    assert session(user="u", prompt_cache_key="p") == "p"
    assert session(user="u") == "u"
    assert session() is None


def test_a_model_does_one_kind_of_work() -> None:
    embeds = ModelCapabilities(generates=False, embeds=True)
    embed_body = decode_embedding(b'{"model": "m", "input": "x"}')
    for refused in (
        lambda: chat(embeds),
        lambda: completion_call(decode_completion(b'{"model": "m", "prompt": "x"}'), 100, embeds),
        lambda: embedding_call(embed_body, 100, ModelCapabilities()),
    ):
        with pytest.raises(RequestError) as caught:
            refused()
        assert (caught.value.code, caught.value.param) == ("unsupported_task", "model")
    assert embedding_call(embed_body, 100, embeds).inputs == ("x",)


def test_powers_are_those_that_all_decoding_pools_have() -> None:
    def capabilities(*pools: dict[str, Any]) -> ModelCapabilities:
        return model_capabilities(
            Deployment(disaggregation="never", pools=tuple(PoolSpec(**p) for p in pools))
        )

    parsing = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    one = {"name": "a", "role": Role.BOTH, "engine": parsing}
    assert capabilities(one) == ModelCapabilities(tools=True, reasoning=True)
    assert capabilities(one, {"name": "b", "role": Role.BOTH}) == ModelCapabilities()
    assert capabilities(one, {"name": "p", "role": Role.PREFILL}) == ModelCapabilities(
        tools=True, reasoning=True
    )
    assert model_capabilities(Deployment(api=ApiSpec(trust_chat_templates=True))).client_templates


def test_an_embedding_call_has_its_inputs_and_form() -> None:
    def call(**body: Any) -> EmbeddingCall:
        return embedding_call(decode_embedding(json.dumps({"model": "m", **body}).encode()), 100, ALL)

    assert call(input="a") == EmbeddingCall("m", ("a",), False, None, True, None, 0)
    assert call(input=["a", "b"]).inputs == ("a", "b")
    assert call(input=[1, 2]).inputs == (array("I", [1, 2]),)
    assert call(input=[[1], [2, 3]]).inputs == (array("I", [1]), array("I", [2, 3]))
    full = call(
        input="a", encoding_format="base64", dimensions=8, add_special_tokens=False, priority=3,
        truncate_prompt_tokens=-1,
    )  # fmt: skip
    assert full == EmbeddingCall("m", ("a",), True, 8, False, Truncation(-1, keep_start=True), 3)
    assert call(input="a", truncate_prompt_tokens=5, truncation_side="left").truncation == Truncation(5)


def test_tokenize_renders_a_chat_as_the_chat_itself_is_rendered() -> None:
    def asked(**body: Any) -> Any:
        return tokenize_call(decode_tokenize(json.dumps(body).encode()), "m", TEMPLATE, ALL)

    assert asked(prompt="a").text == "a"
    assert asked(prompt="a").add_special_tokens
    assert asked(messages=USER).text == chat().prompts[0]
    assert not asked(messages=USER).add_special_tokens
    assert asked(messages=USER, add_generation_prompt=False, return_token_strs=True).text == "[user:hi]"
    assert asked(prompt="a", return_token_strs=True).show_strings


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "((a{0,1000}){0,1000}){0,1000}"}, "guided_regex"),
        ({"guided_grammar": 'root ::= root root | "a"'}, "guided_grammar"),
        ({"structured_outputs": {"json": {"pattern": r"(\w+\s?)+"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"pattern": "((a*)*)*"}'}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": "((a*)*)*"},
                }
            },
            "response_format",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"pattern": "((a*)*)*"}, "strict": True},
                    }
                ]
            },
            "tools[0]",
        ),
    ],
)
def test_a_constraint_that_costs_too_much_per_token_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="too costly to match") as refused:
        chat(**body)
    assert (refused.value.code, refused.value.param) == ("grammar_too_costly", param)


def test_patterns_of_tools_that_no_grammar_enforces_are_not_judged() -> None:
    function = {"name": "f", "parameters": {"pattern": "((a*)*)*"}}
    assert chat(tools=[{"type": "function", "function": function}]).parsing is not None
    with pytest.raises(RequestError, match="too costly"):
        chat(tools=[{"type": "function", "function": function}], tool_choice="required")
