"""The chats that kvasir-tiny practises tools on, and the verdicts of its test."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.openai.schema.chat import Tool
from kvasir_platform.gateway.openai.toolbox import template_tools
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

TINY = resolve_model("kvasir-tiny")
LETTERS = "abcdefghijklmnopqrst"
BOOK = " ".join(
    f"the {a}{b}ord of the {a.upper()}{b}am," for a in LETTERS for b in LETTERS for _ in range(30)
)
KINDS = ("one", "none", "parallel", "result", "json by schema", "json by words")


class Chats:
    """Stands in for the chats that are made of the books."""

    rng: Any = None

    def talk(self) -> tuple[str, str]:
        return "Hello", "Hello!"

    turn = talk

    def saying(self) -> str:
        return 'A "small" thing.'


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY.parent))
        yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("tiny_")]:
        del sys.modules[name]


def maker(made: Any, kept: bool) -> Any:
    return made("tiny_practice").ToolMaker(made("tiny_words").Words([BOOK], False), Chats(), kept)


def cases(made: Any, kept: bool = False) -> Iterator[Any]:
    practice = maker(made, kept)
    for number in range(200):
        practice.seed(number)
        yield practice.case(KINDS[number % len(KINDS)])


def test_a_practice_chat_reads_as_the_chat_template_renders_it(made: Any) -> None:
    template = ChatTemplate.from_folder(TINY)
    assert template is not None
    for case in cases(made):
        if case.kind != "one":
            continue
        system = case.prompt.split("<|system|>")[1].partition("Tools, one JSON object per line:")[0].strip()
        question = case.prompt.split("<|user|>")[1].split("<|end|>")[0]
        sent = msgspec.convert([json.loads(tool.line()) for tool in case.tools], list[Tool])
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        rendered = template.render(messages, {}, template_tools(sent))
        assert rendered == case.prompt


def test_the_wanted_answer_is_right_and_that_of_another_case_is_not(made: Any) -> None:
    judge = made("tiny_judge").judge
    found = list(cases(made))
    for case, other in zip(found, found[len(KINDS) :], strict=False):
        assert judge(case, case.answer.removesuffix("<|end|>")) == {"tool": True, "valid": True, "all": True}
        if case.kind != "none" and case.answer != other.answer:
            assert not judge(case, other.answer.removesuffix("<|end|>"))["all"]
    called = next(case for case in found if case.kind == "one")
    assert not any(judge(called, "I will call it.").values())
    assert not judge(called, '<tool_call>\n{"name": "x", "arguments"')["valid"]


def test_what_is_tested_was_not_practised(made: Any) -> None:
    practised = {tool.name for case in cases(made) for tool in case.tools}
    tested = {tool.name for case in cases(made, kept=True) for tool in case.tools}
    assert practised
    assert tested
    assert not practised & tested


def test_of_json_under_a_grammar_only_what_the_model_writes_is_learned(made: Any) -> None:
    practice = maker(made, False)
    for number in range(50):
        practice.seed(number)
        case = practice.bound_json() if number % 2 else practice.made_json(bound=True)
        answer = "".join(text for text, _ in case.pieces[1:]).removesuffix("<|end|>")
        *learned, end = [text for text, learned in case.pieces if learned]
        assert end == "<|end|>"
        for (key, value), text in zip(json.loads(answer).items(), learned, strict=True):
            assert text.startswith(made("tiny_tools").compact(value).removeprefix('"'))
            assert f'{key}":' not in text


def test_of_a_forced_call_the_names_and_arguments_are_learned(made: Any) -> None:
    practice = maker(made, False)
    listed = 0
    for number in range(100):
        practice.seed(number)
        (_, *pieces) = practice.forced().pieces
        answer = "".join(text for text, _ in pieces).removesuffix("<|end|>")
        learned = "".join(text for text, learned in pieces if learned)
        calls = json.loads(answer)
        if isinstance(calls, dict):
            assert answer == made("tiny_tools").compact(calls)
            continue
        listed += 1
        for call in calls:
            assert list(call) == ["name", "parameters"]
            assert call["name"] in learned
            assert made("tiny_tools").compact(call["parameters"]) in learned
        by_grammar = {text for text, learned in pieces if not learned}
        assert by_grammar <= {'[{"name":"', '{"name":"', 'parameters":'}
    assert 0 < listed < 100


def test_a_chat_depends_on_its_seed_alone(made: Any) -> None:
    first, second = (maker(made, False) for _ in range(2))
    for practice in (first, second):
        practice.seed(5)
    second.case("one")
    second.seed(5)
    assert list(first.conversation()) == list(second.conversation())


def test_heads_are_shown_what_came_after_the_last_occurrence(made: Any) -> None:
    import torch

    a, b, c = 10, 11, 12
    ids = torch.tensor([[0, a, b, c, a, b, c]])
    labels = torch.tensor([[-100] * 5 + [b, c]])
    found = made("tiny_guide").sources(ids, labels)[0]
    assert found.nonzero().tolist() == [[4, 2], [5, 3]]


def test_heads_are_shown_the_word_that_an_answer_goes_on_with(made: Any) -> None:
    spelled = ["\0", " Par", "is", " or", " Pa", "Pa", "ris", " 4", "4"]
    ids = [0, 1, 2, 3, 7, 0, 5, 6, 8, 4]  # asks "Paris or 4", answers "Paris4 Pa"
    labels = [-100] * 6 + ids[6:]
    found = made("tiny_pointers").pointers(spelled, ids, labels, [0] * 10)
    assert found == [(5, 1), (6, 1), (7, 4)]  # "ris" begins within " Par"
    apart = made("tiny_pointers").pointers(spelled, ids, labels, [0] * 6 + [1] * 4)
    assert apart == []  # chats in one row do not see each other


def test_known_tools_are_practised_and_are_not_in_the_tests_of_others(made: Any) -> None:
    known = made("tiny_everyday").NAMES
    assert known & {tool.name for case in cases(made) for tool in case.tools}
    assert not known & {tool.name for case in cases(made, kept=True) for tool in case.tools}
