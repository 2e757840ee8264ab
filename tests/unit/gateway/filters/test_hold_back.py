"""Text held back by filters: no part of a match is sent, all other text is, in order and once."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.config.spec.filters import RegexFilterSpec
from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, TokenLogprob, ToolCallDelta
from kvasir.ports.output_filter import AnswerPart, FilterSubject, OutputFilter
from kvasir_platform.gateway.filters.hold_back import HoldBack
from kvasir_platform.gateway.filters.regex import RegexFilter

PATTERNS = ("ab", "a+b", r"\d{2,3}", "b.*c", "abcab", r"\bcat\b", "(a|bc)d", "c$")
TEXTS = st.text("abcd1 t", max_size=30)


def regex(*patterns: str, count: Callable[[str], None] = lambda _: None, **fields: object) -> RegexFilter:
    spec = {"name": "f", "patterns": patterns, "act": "redact", "replacement": "#", "max_held_chars": 64}
    return RegexFilter(RegexFilterSpec.model_validate(spec | fields), count)


@dataclass
class Choice:
    """A choice past filters, and what has come of it."""

    filters: Sequence[OutputFilter]
    lag: float | None = None
    functions: frozenset[str] = frozenset()
    out: list[Delta] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.held = HoldBack(
            self.filters,
            lambda part: FilterSubject("m", part),
            ruled=lambda: self.keep(self.held.release()),
            lag=self.lag,
            functions=self.functions,
        )

    def keep(self, shown: Delta | None) -> None:
        if shown is not None:
            self.out.append(shown)

    def take(self, **fields: object) -> None:
        self.keep(self.held.take(Delta("r", 0, **fields), self.now))  # type: ignore[arg-type]

    def texts(self, pieces: Sequence[str], finish: FinishReason = FinishReason.STOP) -> Choice:
        for piece in pieces:
            self.take(text=piece)
        self.take(finish=finish)
        return self

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.out)

    @property
    def finish(self) -> FinishReason | None:
        last = [each.finish for each in self.out if each.finish is not None]
        assert len(last) <= 1
        return last[0] if last else None


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(each, len(text)) for each in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def covered(patterns: Sequence[str], text: str, longest: int) -> list[bool]:
    """Which characters lie in a match, or in the last `longest` of one."""
    marked = [False] * len(text)
    for pattern in patterns:
        for end in range(1, len(text) + 1):
            whole = re.compile(rf"(?:{pattern})(?=(?s:.{{{len(text) - end}}})\Z)")
            for begin in range(end):
                if whole.match(text, begin):
                    for at in range(max(begin, end - longest), end):
                        marked[at] = True
                    break
    return marked


def redacted(text: str, marked: Sequence[bool]) -> str:
    shown = ""
    for at, letter in enumerate(text):
        if not marked[at]:
            shown += letter
        elif at == 0 or not marked[at - 1]:
            shown += "#"
    return shown


@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    TEXTS,
    st.lists(st.integers(0, 30), max_size=8),
    st.sampled_from((16, 64)),
)
@example(["b.*c"], "b" + "d" * 20 + "c", [5, 10, 15, 20, 21, 22], 16)
def test_redacted_is_what_lies_in_a_match_and_nothing_else_whatever_the_pieces(
    patterns: list[str], text: str, places: list[int], longest: int
) -> None:
    choice = Choice([regex(*patterns, max_held_chars=longest)]).texts(cut(text, places))
    assert choice.text == redacted(text, covered(patterns, text, longest))
    assert choice.finish is FinishReason.STOP
    assert choice.held.over


@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    TEXTS,
    st.lists(st.integers(0, 30), max_size=8),
)
def test_a_choice_ends_before_its_first_match_whatever_the_pieces(
    patterns: list[str], text: str, places: list[int]
) -> None:
    choice = Choice([regex(*patterns, act="end")]).texts(cut(text, places))
    ends = [
        end
        for end in range(1, len(text) + 1)
        if any(re.search(rf"(?:{p})(?=(?s:.{{{len(text) - end}}})\Z)", text) for p in patterns)
    ]
    if not ends:
        assert (choice.text, choice.finish) == (text, FinishReason.STOP)
        return
    marked = covered(patterns, text, 64)
    assert choice.finish is FinishReason.CONTENT_FILTER
    assert choice.held.cut
    assert text.startswith(choice.text)
    assert len(choice.text) < ends[0]
    assert marked[len(choice.text)]
    whole = Choice([regex(*patterns, act="end")]).texts([text])
    assert whole.text == choice.text


@given(
    st.lists(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2), min_size=2, max_size=3),
    TEXTS,
    st.lists(st.integers(0, 30), max_size=8),
)
def test_several_filters_redact_what_any_of_them_finds(
    filters: list[list[str]], text: str, places: list[int]
) -> None:
    choice = Choice([regex(*each) for each in filters]).texts(cut(text, places))
    every = [pattern for each in filters for pattern in each]
    assert choice.text == redacted(text, covered(every, text, 64))


@given(TEXTS, st.lists(st.integers(0, 30), max_size=8), st.integers(1, 4), st.booleans())
def test_token_ids_never_tell_of_what_was_redacted_and_none_else_is_missing(
    text: str, places: list[int], lag: int, late: bool
) -> None:
    """One token is one character; with `late`, text comes `lag` characters after its token."""
    filters = [regex("ab", r"\d{2,3}")]
    choice = Choice(filters, lag=lag)
    sent = 0
    edges = [*sorted({min(each, len(text)) for each in places}), len(text)]
    shown = 0
    for edge in edges:
        ids = tuple(range(sent, edge))
        upto = max(shown, edge - lag) if late else edge
        choice.take(text=text[shown:upto], token_ids=ids)
        sent, shown = edge, upto
    choice.take(text=text[shown:], finish=FinishReason.STOP)
    marked = covered(["ab", r"\d{2,3}"], text, 64)
    assert choice.text == redacted(text, marked)
    told = [each for delta in choice.out for each in delta.token_ids]
    assert told == sorted(set(told))
    assert not any(marked[each] for each in told)
    if not any(marked):
        assert told == list(range(len(text)))


def test_a_match_is_redacted_though_what_it_waited_for_comes_to_nothing() -> None:
    assert Choice([regex("xab1", "ab")]).texts(["xab", "q"]).text == "x#q"


def test_a_match_that_a_slower_filter_finds_around_another_one_is_redacted_from_its_beginning() -> None:
    choice = Choice([regex("x.*y"), regex("b")]).texts(["x1b2", "y."])
    assert choice.text == "#."


def test_text_goes_out_with_its_tokens_and_not_before() -> None:
    choice = Choice([regex("secret")], lag=3)
    choice.take(text="ab", token_ids=(1,))
    choice.take(text="cde", token_ids=(2,))
    choice.take(finish=FinishReason.STOP)
    assert [(each.text, each.token_ids) for each in choice.out] == [("", ()), ("ab", (1,)), ("cde", (2,))]


def test_ordinary_text_passes_through_as_the_same_object() -> None:
    choice = Choice([regex("secret")])
    delta = Delta("r", 0, (1,), text="hello")
    assert choice.held.take(delta, 0.0) is delta


def test_what_may_be_the_beginning_of_a_match_waits_and_the_rest_goes_at_once() -> None:
    choice = Choice([regex("secret")])
    choice.take(text="my sec", token_ids=(1, 2))
    assert choice.text == "my "
    assert choice.out[0].token_ids == (1, 2)
    choice.take(text="tor")
    assert choice.text == "my sector"


def test_no_more_than_the_bound_waits() -> None:
    counts: list[str] = []
    choice = Choice([regex("b.*c", max_held_chars=16, count=counts.append)])
    choice.take(text="b" + "d" * 15)
    assert (choice.text, counts) == ("", [])
    choice.take(text="d" * 25)
    assert len(choice.text) == 41 - 16
    choice.take(text="d")
    assert counts == ["released_at_bound"]


def test_at_the_bound_the_choice_ends_where_the_spec_wants_it() -> None:
    text = "xb" + "d" * 40
    # What comes after the bound changes nothing, also in the same piece.
    for pieces in ([*text], [text], [*text, "\n"], [text + "\nfine"]):
        choice = Choice([regex("b.*c", max_held_chars=16, at_bound="end")]).texts(pieces)
        assert choice.finish is FinishReason.CONTENT_FILTER
        assert "b" not in choice.text


def test_what_was_found_before_the_bound_is_redacted_where_the_choice_ends_at_it() -> None:
    for pieces in (["ab b" + "d" * 40], [*("ab b" + "d" * 40)]):
        choice = Choice([regex("ab", "b.*c", max_held_chars=16, at_bound="end", parts=("content",))])
        choice.texts(pieces)
        assert (choice.text, choice.finish) == ("#", FinishReason.CONTENT_FILTER)


def test_text_that_has_waited_too_long_is_let_through_and_the_rest_of_a_match_still_redacted() -> None:
    counts: list[str] = []
    choice = Choice([regex("secret", max_held_s=5.0, count=counts.append)])
    choice.take(text="sec")
    assert choice.held.due_s() == 5.0
    choice.keep(choice.held.expire(4.9))
    assert choice.text == ""
    choice.keep(choice.held.expire(5.0))
    assert (choice.text, counts) == ("sec", ["released_at_bound"])
    assert choice.held.due_s() is None
    choice.take(text="ret!")
    assert choice.text == "sec#!"


def test_text_that_has_waited_too_long_ends_the_choice_where_the_spec_wants_it() -> None:
    choice = Choice([regex("secret", max_held_s=5.0, at_bound="end")])
    choice.take(text="a sec")
    choice.keep(choice.held.expire(5.0))
    assert (choice.text, choice.finish) == ("a ", FinishReason.CONTENT_FILTER)


def test_parts_are_texts_of_their_own_in_the_order_in_which_they_were_written() -> None:
    choice = Choice([regex("abc")])
    choice.take(reasoning="x ab")
    choice.take(text="c then ab")
    choice.take(tool_calls=(ToolCallDelta(0, "id", "f"), ToolCallDelta(0, arguments='{"q":"abc","r":"ab')))
    choice.take(tool_calls=(ToolCallDelta(0, arguments='c"}'),))
    choice.take(finish=FinishReason.STOP)
    assert "".join(each.reasoning for each in choice.out) == "x ab"
    assert choice.text == "c then ab"
    calls = [call for each in choice.out for call in each.tool_calls]
    assert calls[0] == ToolCallDelta(0, "id", "f")
    assert "".join(call.arguments for call in calls) == '{"q":"#","r":"#"}'


@given(
    st.lists(st.tuples(st.sampled_from(("content", "reasoning", "call")), st.text("abc", max_size=4))),
    st.sampled_from(("redact", "end")),
)
@example([("content", "xab"), ("reasoning", "so"), ("content", "c")], "end")
def test_what_lies_across_an_interruption_is_found(pieces: list[tuple[str, str]], act: str) -> None:
    """The client puts the pieces of a part together, and reads what the filter is to keep from it."""
    choice = Choice([regex("abc", "ca", act=act)])
    said = {"content": "", "reasoning": "", "call": ""}
    for part, text in pieces:
        said[part] += text
        if part == "content":
            choice.take(text=text)
        elif part == "reasoning":
            choice.take(reasoning=text)
        else:
            choice.take(tool_calls=(ToolCallDelta(0, arguments=text),))
    choice.take(finish=FinishReason.STOP)
    shown = {
        "content": choice.text,
        "reasoning": "".join(each.reasoning for each in choice.out),
        "call": "".join(call.arguments for each in choice.out for call in each.tool_calls),
    }
    bad = any("abc" in each or "ca" in each for each in said.values())
    if bad and act == "end":
        assert choice.finish is FinishReason.CONTENT_FILTER
    for each in shown.values():
        assert "abc" not in each
        assert "ca" not in each
    if not bad:
        assert shown == said


def test_a_part_that_goes_on_is_no_text_that_begins() -> None:
    choice = Choice([regex(r"\Ax+b", r"\bcat", max_held_chars=16)])
    choice.take(text="." + "x" * 40)
    choice.take(reasoning="so")
    choice.take(text="b")
    choice.take(reasoning="so")
    choice.take(text="cat", finish=FinishReason.STOP)
    assert choice.text == "." + "x" * 40 + "bcat"


@pytest.mark.parametrize(
    "call_id", ["", "chatcmpl-tool-" + "0a" * 16, "functions.find:0", "call_2_" + "0a" * 16]
)
def test_a_call_of_what_the_client_offers_begins_at_once(call_id: str) -> None:
    choice = Choice([regex("find")], functions=frozenset({"find"}))
    call = ToolCallDelta(0, call_id, "find")
    choice.take(tool_calls=(call,))
    assert choice.out[0].tool_calls == (call,)


@pytest.mark.parametrize(
    ("call_id", "name"), [("chatcmpl-tool-" + "0a" * 16, "say_secret"), ("secret.find:0", "find")]
)
def test_a_name_or_an_id_that_the_model_made_up_is_judged(call_id: str, name: str) -> None:
    call = ToolCallDelta(0, call_id, name)
    for act, shown in (
        ("redact", (ToolCallDelta(0, "call_0", '"'), ToolCallDelta(0, arguments="{}"))),
        ("end", ()),
    ):
        choice = Choice([regex("secret", act=act, replacement='"')], functions=frozenset({"find"}))
        choice.take(text="I say ", tool_calls=(call,))
        choice.take(tool_calls=(ToolCallDelta(0, arguments="{}"),), finish=FinishReason.STOP)
        assert tuple(each for delta in choice.out for each in delta.tool_calls) == shown
        assert choice.text == "I say "
    harmless = Choice([regex("nothing")], functions=frozenset({"find"}))
    harmless.take(tool_calls=(call,), finish=FinishReason.STOP)
    assert harmless.out[0].tool_calls == (call,)


@pytest.mark.parametrize("act", ["redact", "end"])
@pytest.mark.parametrize("said", ["fine", "a secret"])
def test_where_text_may_come_much_later_tokens_wait_for_the_end_and_the_text_does_not(
    act: str, said: str
) -> None:
    """A parser keeps the text of three tokens for a while."""
    choice = Choice([regex("secret", act=act)], lag=math.inf)
    choice.take(text="so ", token_ids=(0,))
    assert choice.text == "so "
    for number in (1, 2, 3):
        choice.take(token_ids=(number,))
    choice.take(text=said)
    choice.take(text=".", token_ids=(4,), finish=FinishReason.STOP)
    told = [each for delta in choice.out for each in delta.token_ids]
    if said == "fine":
        assert told == [0, 1, 2, 3, 4]
    else:
        assert told == ([4] if act == "redact" else [])


def test_where_a_filter_ends_a_choice_its_reasoning_is_counted_all_the_same() -> None:
    choice = Choice([regex("secret", act="end")])
    choice.take(reasoning="hm", token_ids=(1, 2))
    choice.take(text="a secret", token_ids=(3,))
    assert choice.out[-1].reasoning_tokens == 2


def test_much_that_waits_behind_one_filter_goes_out_as_it_may() -> None:
    choice = Choice([regex(r"\d"), regex("x.*y", max_held_chars=4096)])
    choice.texts(["x", *("1a" * 3000)])
    assert choice.text == "x" + "#a" * 3000


def test_a_replacement_leaves_the_json_of_arguments_whole() -> None:
    choice = Choice([regex("abc", replacement='"\\')])
    choice.take(tool_calls=(ToolCallDelta(0, "id", "f", '{"q":"abc"}'),), finish=FinishReason.STOP)
    assert choice.out[0].tool_calls[-1].arguments == r'{"q":"\"\\"}'


def test_only_the_parts_that_a_filter_names_are_judged() -> None:
    choice = Choice([regex("abc", parts=("reasoning",))])
    choice.take(reasoning="abc", text="abc", finish=FinishReason.STOP)
    assert (choice.out[0].reasoning, choice.text) == ("#", "abc")


def test_logprobs_leave_with_their_text_and_those_of_redacted_text_not_at_all() -> None:
    choice = Choice([regex("abc")], lag=1)

    def position(token: str) -> tuple[PositionLogprobs, ...]:
        return (PositionLogprobs(TokenLogprob(1, token, -1.0)),)

    for token in ("hi ", "ab", "c", " you", "!"):
        choice.take(text=token, token_ids=(len(token),), logprobs=position(token))
    choice.take(finish=FinishReason.STOP)
    assert choice.text == "hi # you!"
    told = [each.sampled.token for delta in choice.out for each in delta.logprobs]
    # A token's text may end within the next one's, so that the neighbours of what was redacted go with it.
    assert told == [" you", "!"]


def test_the_end_carries_what_the_engine_said_of_it() -> None:
    choice = Choice([regex("abc")])
    choice.take(text="ab")
    choice.take(text="d", finish=FinishReason.STOP, stop_reason="x", reasoning_tokens=3)
    last = choice.out[-1]
    assert (choice.text, last.finish, last.stop_reason, last.reasoning_tokens) == (
        "abd",
        FinishReason.STOP,
        "x",
        3,
    )


def test_nothing_goes_out_after_the_end() -> None:
    choice = Choice([regex("abc", act="end")])
    choice.take(text="x abc y")
    before = list(choice.out)
    choice.take(text="more", finish=FinishReason.STOP)
    choice.keep(choice.held.settle())
    assert choice.out == before


def test_a_choice_without_a_last_word_is_settled() -> None:
    choice = Choice([regex("abc")])
    choice.take(text="ab")
    choice.keep(choice.held.settle())
    assert choice.text == "ab"
    assert choice.held.over


@pytest.mark.parametrize("part", list(AnswerPart))
def test_a_filter_applies_to_the_models_and_tenants_that_it_names(part: AnswerPart) -> None:
    each = regex("abc", models=("m",), tenants=("t",))
    assert each.applies(FilterSubject("m", part, "t"))
    assert not each.applies(FilterSubject("m2", part, "t"))
    assert not each.applies(FilterSubject("m", part))
