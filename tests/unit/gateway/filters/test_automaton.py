"""Patterns match as in Python, in linear time, and are refused where they cannot."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.config.checks.patterns import MAX_REPEATED_STATES, PatternError, build_graph
from kvasir_platform.gateway.filters import automaton as automata
from kvasir_platform.gateway.filters.automaton import MAX_WEIGHT, Automaton, Scan

LETTERS = "abAB1 _\n"
ATOMS = ("a", "b", "A", "1", r"\d", r"\w", r"\s", ".", "[ab]", "[^a]", r"\W", r"\x61", "(?i:a)", "[]a]")
GUARDS = (r"\b", r"\B", "^", r"\A", r"\Z", "(?m:^)", "(?m:$)")


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from((*ATOMS, *GUARDS))
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
            st.tuples(inner, st.sampled_from(("*", "+", "?", "{2}", "{1,2}", "{0,1}?", "{1,}", "*?"))).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


def matches(pattern: str, text: str) -> list[tuple[int, int]]:
    """For each place where any match ends, the longest that ends there, by Python's own engine."""
    found = []
    for end in range(1, len(text) + 1):
        rest = len(text) - end
        whole = re.compile(rf"(?:{pattern})(?=(?s:.{{{rest}}})\Z)")
        begins = [begin for begin in range(end) if whole.match(text, begin)]
        if begins:
            found.append((begins[0], end))
    return found


def scanned(pattern: str, pieces: list[str]) -> list[tuple[int, int]]:
    scan = Scan(Automaton(build_graph([pattern])))
    found: dict[int, int] = {}
    for piece in pieces:
        for begin, end in scan.feed(piece):
            found[end] = min(begin, found.get(end, begin))
    for begin, end in scan.finish():
        found[end] = min(begin, found.get(end, begin))
    return [(begin, end) for end, begin in sorted(found.items())]


@given(patterns(), st.lists(st.text(LETTERS, max_size=5), max_size=5))
@example(r"a\b", ["a", " "])
@example(r"(?m:^)a", ["b\n", "a"])
@example(r"a{2}", ["aaa", "a"])
def test_every_match_is_found_as_python_finds_it_however_the_text_is_cut(
    pattern: str, pieces: list[str]
) -> None:
    try:
        found = scanned(pattern, pieces)
    except PatternError as refused:
        if "empty text" not in str(refused):
            raise
        return
    assert found == matches(pattern, "".join(pieces))


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"[\w.]+@\w+\.com", "to ann@x.com now", [(3, 12)]),
        (r"(?i)secret", "SeCrEt", [(0, 6)]),
        (r"\$\d{1,3}", "is $42", [(3, 5), (3, 6)]),
        (r"a{,2}b", "aab", [(0, 3)]),
        (r"x{a", "x{a", [(0, 3)]),
        (r"[^]]x", "]xax", [(2, 4)]),
        ("(?P<n>ab)(?#not this)c", "abc", [(0, 3)]),
        (r"\N{BULLET}", "\u2022", [(0, 1)]),
        ("end$", "end end", [(4, 7)]),
        (r"\bcat", "x" * 40 + "cat " + "." * 40 + "cat", [(84, 87)]),
        ("(?i)ß", "ß", [(0, 1)]),
    ],
)
def test_syntax_means_what_it_means_in_python(
    pattern: str, text: str, expected: list[tuple[int, int]]
) -> None:
    assert scanned(pattern, [text]) == expected


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "no regular expression"),
        ("a*", "empty text"),
        (r"(a)\1", "back-reference"),
        ("(?P<x>a)(?P=x)", "back-reference"),
        ("a(?=b)", "lookahead"),
        ("(?<!b)a", "lookbehind"),
        ("(?>a+)b", "atomic"),
        ("a++b", "possessive"),
        ("(?x)a b", "flag 'x'"),
        ("(a)?(?(1)b|c)", "condition"),
        ("((a{99}){99}){99}", f"{MAX_REPEATED_STATES} states"),
        ("a{4000000000}", f"{MAX_REPEATED_STATES} states"),
        (r"\b", "empty text"),
        ("(" * 60 + "a" + ")" * 60, "nested"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_number_and_reason(pattern: str, says: str) -> None:
    with pytest.raises(PatternError, match=re.escape(says)) as refused:
        build_graph(["fine", pattern])
    assert str(refused.value).startswith("pattern 1 ")


def test_the_classic_exponential_pattern_takes_one_known_step_per_character() -> None:
    automaton = Automaton(build_graph([r"(a+)+b"]))
    computed = 0
    compute = automaton.step

    def counted(node, letter):  # type: ignore[no-untyped-def]
        nonlocal computed
        computed += 1
        return compute(node, letter)

    automaton.step = counted  # type: ignore[method-assign]
    scan = Scan(automaton)
    assert scan.feed("a" * 50_000) == []
    assert scan.feed("b") == [(0, 50_001)]
    assert computed <= 4


def test_many_patterns_are_one_automaton_and_forgetting_its_steps_changes_nothing() -> None:
    words = [f"word{number:03}x" for number in range(400)]
    automaton = Automaton(build_graph(words))
    automaton.weight = MAX_WEIGHT - 200
    scan = Scan(automaton)
    assert scan.feed("so word123x and word399x") == [(3, 11), (16, 24)]


def test_what_is_kept_is_bounded_though_every_character_makes_a_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automata, "MAX_WEIGHT", 100_000)
    automaton = Automaton(build_graph(["a.{60}b"]))
    scan = Scan(automaton)
    scan.feed("-" * 40)
    letters = random.Random(1)
    for _ in range(3000):
        scan.feed(letters.choice("ab"))
        assert automaton.weight < 101_000
    scan.feed("\n" + "-" * 40)
    nodes = automaton._nodes.values()
    assert set(map(id, automaton._idle.values())) <= set(map(id, nodes))
    words = sum(len(group) + 8 for node in nodes for group in node.groups)
    assert words + 25 * sum(len(node.steps) for node in nodes) <= automaton.weight


def test_a_long_alternation_in_a_loop_is_followed_as_python_does() -> None:
    pattern = f"x(?:{'|'.join(chr(0x4E00 + n) for n in range(200))}|a?b)+y"
    text = "x\u4e00\u4e05ab\u4e07by xay"
    assert scanned(pattern, list(text)) == matches(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?i:stra\u00dfe)", "STRA\u00dfE STRA\u1e9eE"),
        ("(?i:\u0130)", "i\u0307\u0130I"),
        ("\U0001f600+", "a\U0001f600\U0001f600b"),
        ("e\u0301", "caf\u00e9 cafe\u0301"),
        (r"\w+@", "\u0434\u0430\u0448\u0430@"),
        (r"\bn\u00e3o\b", "n\u00e3o, n\u00e3os"),
        (r"[\U0001f1e6-\U0001f1ff]{2}", "\U0001f1e9\U0001f1ea"),
        ("a.b", "a\u2028b"),
        ("(?m:^)b", "a\u2028b"),
        (r"\d{3}", "\u0661\u0662\u0663"),
    ],
)
def test_characters_beyond_ascii_are_what_they_are_in_python(pattern: str, text: str) -> None:
    assert scanned(pattern, list(text)) == matches(pattern, text)
