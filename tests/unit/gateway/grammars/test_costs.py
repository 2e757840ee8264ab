"""Which patterns, schemas and grammars are refused because their masks would take too long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.grammars.checks import (
    MAX_PARTS,
    judge_grammar,
    judge_regex,
    judge_schema,
    judge_tag,
    new_meter,
)
from kvasir_platform.gateway.grammars.nodes import Meter, TooCostlyError

Judge = Callable[[Any, Meter], None]


def judged(judge: Judge, value: Any) -> int:
    """Return the number of parts that were counted."""
    meter = new_meter()
    judge(value, meter)
    return meter.used


# Each of these takes from 20 ms to seconds for one mask of 131,072 tokens, or grows to that.
COSTLY_PATTERNS = [
    "((a{0,1000}){0,1000}){0,1000}",
    "(a{0,100}){0,100}",
    "(a{0,20}){0,20}b{0,500}",
    "(a{0,12}){0,12}b",
    "((a*)*)*",
    "(a*)*b",
    "(a+a+)+b",
    r"(\w+\s?)+",
    r"(\w+\s?){1,50}",
    r"([a-z]+ ?)+\.",
    "(a?b?c?d?){0,30}x",
    "((a|b*)+c?)*",
    "((a|aa){0,8}b?){0,8}c",
    ".*a.{100}",
    ".{0,90}a.{0,90}",
]
GOOD_PATTERNS = [
    "a{0,100000}",
    r"\w+(\s\w+)*",
    r"\p{L}+(\s\p{L}+)*",
    r"(- .{1,100}\n){1,20}",
    r"([A-Z][^.!?]*[.!?]\s*){1,5}",
    r"([^,]+, )*[^,]+",
    ".*foo.*bar.*baz.*qux.*",
    r"(\\.|[^\"\\])*",
    r"(.|\n){0,2000}",
    "(yes|no|maybe)( (and|or) (yes|no|maybe)){0,20}",
    "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}",
    r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    r"https?:\/\/(www\.)?[-a-zA-Z0-9@:%._\+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}\b([-a-zA-Z0-9()@:%_\+.~#?&//=]*)",
    r"((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)",
    r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:\d{2})?)?",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
    r"v?\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?",
    "a" * 4096,
]
COSTLY_GRAMMARS = [
    'root ::= root root | "a"',
    'root ::= root root root | "a"',
    'root ::= s s s s\ns ::= s s | "a" | ""',
    'root ::= (("a"*)*)*',
    'root ::= x*\nx ::= y*\ny ::= "a"*',
    "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(20)) + 'a20 ::= "a"?',
    'start: (("a"*)*)* "b"',
    'start: start start | "a"',
    "start: /((a{0,100}){0,100})/",
    "start: word~1..60\nword: /[a-z]+ ?/",
]
GOOD_GRAMMARS = [
    r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
""",
    'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= factor (("*" | "/") factor)*\n'
    'factor ::= [0-9]+ | "(" expr ")" | name "(" expr ("," expr)* ")"\nname ::= [a-z]+',
    'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | "-" e | [a-z]+',
    'root ::= "(" root root ")" | "a"',
    'root ::= sexp\nsexp ::= [a-z]+ | "(" sexp (" " sexp)* ")"',
    'root ::= TagDispatch(("<a>", rule), ("<b>", rule))\nrule ::= "x"*',
    '?start: expr\n?expr: term (("+"|"-") term)*\n?term: NUMBER | "(" expr ")" -> inner\nNUMBER: /[0-9]+/\n'
    "%import common.WS\n%ignore WS",
]


@pytest.mark.parametrize("pattern", COSTLY_PATTERNS)
def test_a_pattern_that_can_be_read_in_many_ways_is_refused_wherever_it_stands(pattern: str) -> None:
    for judge, value in (
        (judge_regex, pattern),
        (judge_schema, {"anyOf": [{"type": "object", "properties": {"a": {"pattern": pattern}}}]}),
        (judge_schema, {"patternProperties": {pattern: {"type": "string"}}}),
        (judge_tag, {"format": {"type": "tag", "content": {"type": "regex", "pattern": pattern}}}),
        (judge_tag, {"structures": [{"begin": "<", "schema": {"pattern": pattern}, "end": ">"}]}),
    ):
        with pytest.raises(TooCostlyError, match="allowed"):
            judged(judge, value)


@pytest.mark.parametrize("pattern", GOOD_PATTERNS)
def test_a_pattern_with_one_way_to_read_it_is_accepted_however_large(pattern: str) -> None:
    judged(judge_regex, pattern)


@pytest.mark.parametrize("grammar", COSTLY_GRAMMARS)
def test_a_grammar_that_can_be_read_in_many_ways_is_refused(grammar: str) -> None:
    with pytest.raises(TooCostlyError):
        judged(judge_grammar, grammar)
    with pytest.raises(TooCostlyError):
        judged(judge_tag, {"format": {"type": "grammar", "grammar": grammar}})


@pytest.mark.parametrize("grammar", GOOD_GRAMMARS)
def test_a_grammar_with_few_ways_to_read_it_is_accepted(grammar: str) -> None:
    judged(judge_grammar, grammar)


def test_formats_of_tags_that_repeat_each_other_are_refused() -> None:
    text: dict[str, Any] = {"type": "const_string", "value": "a"}
    star = {"type": "star", "content": text}
    judged(judge_tag, {"format": star})
    for nested in (
        {"type": "star", "content": {"type": "plus", "content": star}},
        {"type": "repeat", "min": 0, "max": 90, "content": {"type": "optional", "content": text}},
        {"type": "sequence", "elements": [star, {"type": "star", "content": star}]},
        {"type": "triggered_tags", "tags": [{"type": "tag", "content": {"type": "star", "content": star}}]},
    ):
        with pytest.raises(TooCostlyError, match="ways"):
            judged(judge_tag, {"format": nested})


def test_values_in_a_schema_are_no_patterns() -> None:
    pattern = "((a*)*)*"
    judged(judge_schema, {"enum": [{"pattern": pattern}], "default": {"pattern": pattern}})
    judged(judge_schema, {"properties": {"pattern": {"type": "string"}}})


@pytest.mark.parametrize(
    ("judge", "value"),
    [
        (judge_regex, "a" + "{1,2}" * 400),
        (judge_regex, "(" * 60 + "a" + ")" * 60),
        (judge_grammar, "root ::= " + "(" * 60 + '"a"' + ")" * 60),
        (judge_grammar, "".join(f'r{i} ::= "x" r{(i * 7) % 1000} | "y"\n' for i in range(1000))),
        (judge_grammar, "root ::= " + " | ".join(f'"{i}"' for i in range(10_000))),
        (judge_grammar, "root ::= " + " | ".join('"a" "b" ' * 16 + f'"{i}"' for i in range(200))),
        (judge_schema, [{"pattern": "[a][b]" * 300} for _ in range(100)]),
    ],
)
def test_what_is_too_large_to_judge_is_refused(judge: Judge, value: Any) -> None:
    meter = new_meter()
    with pytest.raises(TooCostlyError):
        judge(value, meter)
    assert meter.used <= 2 * MAX_PARTS


@given(st.text(alphabet="ab()[]{}|*+?.,\\09^$-=:<!", max_size=60))
def test_any_text_is_judged_or_refused(text: str) -> None:
    for judge, value in (
        (judge_regex, text),
        (judge_grammar, "root ::= " + text),
        (judge_grammar, "start: " + text),
        (judge_tag, {"format": {"type": text, "content": text}}),
    ):
        with contextlib.suppress(TooCostlyError):
            judged(judge, value)
