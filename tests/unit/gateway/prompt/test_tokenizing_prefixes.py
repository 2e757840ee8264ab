"""Cached tokens of earlier turns are reused for equal prefixes, and only for the same sender."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.gateway.encoders import CHAT, Liar, ids_of, save
from tests.kit.gateway.tokenizer_families import EACH_FAMILY, RELAXED, TEXTS
from tokenizers import Tokenizer

from kvasir_platform.gateway.prompt.fast_tokenizer import ProvenEncoder, Reference, load_encoder
from kvasir_platform.gateway.prompt.prefix_tokens import PrefixTokens, cut_marker
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer


@EACH_FAMILY
def test_texts_cut_at_the_marker_get_the_ids_of_the_whole(
    make: Callable[[], Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_platform.gateway.prompt.prefix_tokens.MIN_CHARS", 1)
    monkeypatch.setattr("kvasir_platform.gateway.prompt.tokenization.MIN_CHARS", 1)
    path = save(tmp_path, make)
    marker = cut_marker(path.read_bytes(), CHAT)
    if make.__name__ in ("mistral", "stripping"):
        assert marker is None
        return
    assert marker == "<|end|>"
    reference = Reference.from_file(path)
    prefixes = PrefixTokens(marker, 1 << 20)
    cached = ModelTokenizer(load_encoder(path, CHAT), None, prefixes)
    turns = st.lists(TEXTS, min_size=1, max_size=6)

    @RELAXED
    @given(turns, st.integers(0, 6))
    def agree(texts: list[str], before: int) -> None:
        earlier, whole = marker.join(texts[:before]) + marker, marker.join(texts)
        cached.encode([earlier], add_special_tokens=False)
        assert cached.encode([whole], add_special_tokens=False) == ids_of(reference, whole)

    agree()
    assert prefixes.counts().found > 0


def test_a_next_turn_tokenizes_only_what_is_new(tiny: Reference) -> None:
    asked: list[str] = []

    class Asked(Liar):
        def encode(
            self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
        ) -> list[bytes]:
            asked.extend(texts)
            return super().encode(texts, add_special_tokens=add_special_tokens, ordinary=ordinary)

    encoder = ProvenEncoder(Asked(tiny, wrong="\0"), lambda: tiny)
    tokenizer = ModelTokenizer(encoder, None, PrefixTokens("<|end|>", 1 << 20))
    turn = "<|user|>" + "What else is there? " * 60 + "<|end|>"
    first = turn * 3 + "<|assistant|>"
    second = turn * 3 + "<|assistant|>Nothing." + turn + "<|assistant|>"
    tokenizer.encode([first], add_special_tokens=False)
    asked.clear()
    ids = tokenizer.encode([second], add_special_tokens=False)
    assert asked == ["<|assistant|>Nothing." + turn, "<|assistant|>"]
    assert ids == ids_of(tiny, second)


def test_tokens_of_one_salt_are_not_found_under_another(tiny: Reference) -> None:
    prefixes = PrefixTokens("<|end|>", 1 << 20)
    tokenizer = ModelTokenizer(tiny, None, prefixes)
    text = "secret " * 200 + "<|end|>"
    for salt, found in (("", 0), ("a", 0), ("b", 0), ("a", len(text)), ("", len(text))):
        before = prefixes.counts().found
        tokenizer.encode([text], add_special_tokens=False, salt=salt)
        assert prefixes.counts().found - before == found


def test_the_cache_keeps_to_its_bytes_and_drops_the_least_recently_used() -> None:
    prefixes = PrefixTokens("|", 32 << 10)
    texts = [f"{i:04d}" + "x" * 1200 + "|" for i in range(100)]
    for text in texts:
        prefixes.keep(prefixes.cut(text, ""), [b"1234" * 200])
        # Asked for again and again, so never the oldest.
        assert prefixes.cut(texts[0], "").known[0] is not None
        assert prefixes.counts().bytes <= 32 << 10
    counts = prefixes.counts()
    assert counts.evicted > 50
    assert counts.entries + counts.evicted == 100
    assert prefixes.cut(texts[1], "").known[0] is None
    huge = "y" * (12 << 10) + "|"
    prefixes.keep(prefixes.cut(huge, ""), [b"1234"])
    assert prefixes.cut(huge, "").known[0] is None, "one text may not take the whole cache"


def test_conversations_that_part_are_both_found() -> None:
    prefixes = PrefixTokens("|", 1 << 20)
    shared, one, other = ("s" * 2000 + "|", "a" * 2000 + "|", "b" * 2000 + "|")
    for text in (shared + one, shared + other):
        pieces = prefixes.cut(text, "")
        prefixes.keep(pieces, [piece[:4].encode() for piece in pieces.missing()])
    for _ in range(2):
        for second in (one, other, one, one):
            pieces = prefixes.cut(shared + second + "rest", "")
            assert pieces.texts == [shared, second, "rest"]
            assert pieces.known == [b"ssss", second[:4].encode(), None]
    longer = shared + one[:-1] + "a" * 2000 + "|"
    assert prefixes.cut(longer, "").known == [b"ssss", None, b""]


class Watched(str):
    """A text that tells how often it was searched."""

    searches = 0

    def find(self, *args: Any) -> int:
        self.searches += 1
        return super().find(*args)


@pytest.mark.parametrize("letter", ["x", "é", "東"])
def test_what_follows_as_before_is_compared_and_not_searched_for(letter: str) -> None:
    prefixes = PrefixTokens("|", 1 << 20)
    turns = "".join(f"{i}" + "x" * 2000 + "|" for i in range(10)) + letter
    prefixes.keep(prefixes.cut(turns, ""), [b"1234"] * 11)
    prefixes.cut(turns, "")
    text = Watched(turns)
    assert prefixes.cut(text, "").known == [b"1234"] * 10 + [None]
    assert text.searches == 2, "for the first segment and for the end"


def test_what_follows_as_before_counts_as_used() -> None:
    prefixes = PrefixTokens("|", 32 << 10)
    first, second = "a" * 2000 + "|", "b" * 2000 + "|"
    prefixes.keep(prefixes.cut(first + second, ""), [b"1", b"2"])
    for i in range(50):
        assert prefixes.cut(first + second, "").known == [b"1", b"2", b""]
        other = f"{i}" + "c" * 2000 + "|"
        prefixes.keep(prefixes.cut(other, ""), [b"3"])
    assert prefixes.counts().evicted > 20


ADDED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize(
    ("changed", "others"),
    [
        ({"lstrip": True}, ()),
        ({"rstrip": True}, ()),
        ({"single_word": True}, ()),
        ({"normalized": True}, ()),
        ({}, ("<|end|>\n",)),
        ({}, ("xx<|",)),
        ({}, (">yy",)),
        ({"content": "<end<"}, ()),
        ({"content": "<e d>"}, ()),
        ({"content": "<never>"}, ()),
    ],
)
def test_no_cut_where_a_token_might_not_be_matched_as_it_stands(
    changed: dict[str, object], others: Sequence[str]
) -> None:
    conversation = "a<|end|>b<end<c<e d>"

    def marker(token: dict[str, object], more: Sequence[str]) -> str | None:
        added = [token, *({**ADDED, "content": other} for other in more)]
        rules = {"added_tokens": added, "normalizer": {"type": "NFC"}, "model": {"type": "BPE"}}
        return cut_marker(json.dumps(rules).encode(), conversation)

    plain: dict[str, object] = {**ADDED, "content": "<|end|>"}
    assert marker(plain, ("<|other|>",)) == "<|end|>"
    assert marker({**plain, **changed}, others) is None


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}},
        {"pre_tokenizer": {"type": "Metaspace", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Unheard"}]}},
    ],
)
def test_no_cut_where_a_text_depends_on_where_it_stands(spec: dict[str, object]) -> None:
    rules = {"added_tokens": [{**ADDED, "content": "<|end|>"}], **spec}
    assert cut_marker(json.dumps(rules).encode(), CHAT) is None
    assert cut_marker(b"{", CHAT) is None


def test_texts_too_long_to_look_up_are_cut_when_they_are_encoded(tiny: Reference) -> None:
    prefixes = PrefixTokens("<|end|>", 64 << 20)
    tokenizer = ModelTokenizer(tiny, None, prefixes)
    text = ("word " * 300 + "<|end|>") * 400
    encoding = tokenizer.begin([text], add_special_tokens=False)
    assert prefixes.counts().missed == 0
    assert encoding.finish() == ids_of(tiny, text)
    assert prefixes.counts().missed == len(text)
