"""Every encoder gives the ids of Hugging Face's tokenizer, and every wait for them ends."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.kit.gateway.encoders import CHAT, TINY, Liar, ids_of, save
from tests.kit.gateway.tokenizer_families import EACH_FAMILY, PROVABLE, RELAXED, TEXTS, digits, llama3
from tests.kit.models.tiny_tokens import VOCABULARY
from tokenizers import Tokenizer

from kvasir.config.spec.edge import TokenizerSpec
from kvasir.core.errors import CapacityError, ConfigError, RequestError
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.tokenizer_series import TokenizerStats
from kvasir_platform.gateway.prompt import fast_tokenizer
from kvasir_platform.gateway.prompt.fast_tokenizer import Fast, ProvenEncoder, Reference, load_encoder
from kvasir_platform.gateway.prompt.prefix_tokens import PrefixTokens
from kvasir_platform.gateway.prompt.tokenization import Encoding, ModelTokenizer, TokenizerPool


@pytest.mark.parametrize("make", PROVABLE, ids=lambda make: make.__name__)
def test_tokenizers_of_well_known_kinds_are_proven(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("fastokens")
    assert isinstance(load_encoder(save(tmp_path, make), CHAT), ProvenEncoder)


@EACH_FAMILY
def test_any_text_gets_the_ids_of_the_reference(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    path = save(tmp_path, make)
    encoder, reference = load_encoder(path, CHAT), Reference.from_file(path)

    @RELAXED
    @given(TEXTS, st.booleans())
    def agree(text: str, special: bool) -> None:
        ids = reference.encode([text, "x"], add_special_tokens=special)
        assert encoder.encode([text, "x"], add_special_tokens=special) == ids
        for skip in (False, True):
            assert encoder.decode(array("I", ids[0]), skip_special_tokens=skip) == reference.decode(
                array("I", ids[0]), skip_special_tokens=skip
            )

    agree()


@pytest.mark.parametrize("wrong", ["東京", "THEY'RE", "\r\n", "\t"])
def test_a_fast_tokenizer_that_differs_is_not_used(
    wrong: str, tiny: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fast_tokenizer, "Fast", lambda _: Liar(tiny, wrong=wrong))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_encoder(TINY, CHAT), Reference)
    assert len(caplog.records) == 1
    assert "other" in str(caplog.records[0].__dict__["reason"])


def test_texts_with_a_character_that_it_gets_wrong_are_left_to_the_reference(
    tiny: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_tokenizer, "Fast", lambda _: Liar(tiny, wrong="\u180e"))
    encoder = load_encoder(TINY, CHAT)
    assert isinstance(encoder, ProvenEncoder)
    texts = ["plain", "odd \u180e one", "東京"]
    assert encoder.encode(texts, add_special_tokens=False) == tiny.encode(texts, add_special_tokens=False)
    assert (encoder.fast, encoder.failures) == (True, 0)


class Panic(BaseException):
    """As PyO3 raises when Rust code panics."""


@pytest.mark.parametrize(
    "error", [ImportError("no"), ValueError("unsupported"), Panic("index out of bounds")]
)
def test_a_model_that_the_fast_tokenizer_does_not_know_is_served_by_the_reference(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> Fast:
        raise error

    monkeypatch.setattr(fast_tokenizer, "Fast", refuse)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_encoder(TINY, CHAT), Reference)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [ValueError("match limit"), Panic("overflow")])
def test_where_the_fast_tokenizer_fails_the_reference_answers(error: BaseException, tiny: Reference) -> None:
    encoder = ProvenEncoder(Liar(tiny, wrong="boom", error=error), lambda: tiny)
    expected = tiny.encode(["a boom"], add_special_tokens=True)
    assert encoder.encode(["a boom"], add_special_tokens=True) == expected
    assert encoder.encode(["fine"], add_special_tokens=True) == tiny.encode(["fine"], add_special_tokens=True)
    assert (encoder.failures, encoder.fast) == (1, True)


def test_what_is_no_text_is_the_callers_fault(tiny: Reference) -> None:
    pytest.importorskip("fastokens")
    encoder = load_encoder(TINY, CHAT)
    with pytest.raises(UnicodeEncodeError):
        encoder.encode(["\ud800"], add_special_tokens=False)
    assert encoder.failures == 0


def test_the_reference_does_not_come_back_from_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, llama3)
    failing = Liar(Reference.from_file(path), wrong="boom", error=ValueError("match limit"))
    monkeypatch.setattr(fast_tokenizer, "Fast", lambda _: failing)
    encoder = load_encoder(path, CHAT)
    assert isinstance(encoder, ProvenEncoder)
    save(tmp_path, digits)
    with pytest.raises(ConfigError, match="changed"):
        encoder.encode(["a boom"], add_special_tokens=False)
    assert encoder.encode(["fine"], add_special_tokens=False)


@pytest.mark.parametrize("spec", [None, TokenizerSpec()])
def test_a_token_that_the_model_has_no_embedding_of_is_refused(
    tmp_path: Path, spec: TokenizerSpec | None
) -> None:
    shutil.copytree(TINY.parent, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    whole = ModelTokenizer.from_folder(tmp_path / "m", spec)
    text = " home and back"
    (ids,) = whole.encode([text], add_special_tokens=False)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"vocab_size": max(ids)}))
    fewer = ModelTokenizer.from_folder(tmp_path / "m", spec)
    assert (whole.vocabulary, fewer.vocabulary) == (config["vocab_size"], max(ids))
    assert fewer.encode(["", "a"], add_special_tokens=False) == whole.encode(
        ["", "a"], add_special_tokens=False
    )
    with pytest.raises(RequestError, match=f"no embedding of the token .* \\({max(ids)}\\)"):
        fewer.begin(["a", text], add_special_tokens=False).finish()


def test_a_broken_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelTokenizer.from_folder(tmp_path)


def test_a_model_folder_gives_all_of_it() -> None:
    pytest.importorskip("fastokens")
    tokenizer = ModelTokenizer.from_folder(TINY.parent, TokenizerSpec())
    plain = ModelTokenizer.from_folder(TINY.parent)
    slow = ModelTokenizer.from_folder(TINY.parent, TokenizerSpec(fast="never", prefix_cache_bytes=0))
    assert [each.sizes().fast for each in (tokenizer, plain, slow)] == [True, False, False]
    assert tokenizer.vocabulary == plain.vocabulary == VOCABULARY
    text = ("<|user|>" + "Once upon a time. " * 90 + "<|end|>") * 3 + "<|assistant|>"
    for each in (tokenizer, tokenizer, slow):
        encoded = each.encode([text, "é"], add_special_tokens=False)
        assert encoded == plain.encode([text, "é"], add_special_tokens=False)
        whole = each.encode([text], add_special_tokens=True)
        assert whole == plain.encode([text], add_special_tokens=True) != encoded[:1]
        assert each.decode(encoded[0]) == text
        assert "<|" not in each.decode(encoded[0], skip_special_tokens=True)
        assert each.names(encoded[0][:1]) == ["<|user|>"]
    assert tokenizer.sizes().found_characters > 2 * len(text) / 3
    assert slow.sizes().cached_segments == plain.sizes().cached_segments == 0


class Slow:
    """A tokenizer whose work is said to take `work_us` for each text."""

    vocabulary = 1
    template = control = None

    def __init__(self, work_us: float, error: Exception | None = None) -> None:
        self._work_us = work_us
        self._error = error

    def begin(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> Encoding:
        return Encoding(
            self._work_us, lambda: self.encode(texts, add_special_tokens=add_special_tokens, salt=salt)
        )

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> list[array[int]]:
        if self._error is not None:
            raise self._error
        return [array("I", [len(text)]) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def names(self, ids: Sequence[int]) -> list[str]:
        return []

    def sizes(self) -> TokenizerStats:
        return TokenizerStats(fast=True)


class Receiver:
    """Puts what it gets into a future."""

    def __init__(self, done: asyncio.Future[list[array[int]]]) -> None:
        self.encoded = done.set_result
        self.failed = done.set_exception


async def test_little_work_is_done_at_once_and_more_in_a_thread() -> None:
    for work_us, at_once in ((10.0, True), (10_000.0, False)):
        pool = TokenizerPool(Slow(work_us))
        done: asyncio.Future[list[array[int]]] = asyncio.get_running_loop().create_future()
        pool.encode(["abc"], Receiver(done), add_special_tokens=False)
        assert done.done() is at_once
        assert await done == [array("I", [3])]
        pool.close()


async def test_the_pool_asks_under_the_salt_of_its_caller(tiny: Reference) -> None:
    prefixes = PrefixTokens("<|end|>", 1 << 20)
    pool = TokenizerPool(ModelTokenizer(tiny, None, prefixes))
    text = "word " * 300 + "<|end|>"
    for salt, found in (("", 0), ("a", 0), ("a", len(text))):
        before = prefixes.counts().found
        done: asyncio.Future[list[array[int]]] = asyncio.get_running_loop().create_future()
        pool.encode([text], Receiver(done), add_special_tokens=False, salt=salt)
        assert await done == ids_of(tiny, text)
        assert prefixes.counts().found - before == found
    pool.close()


async def test_what_goes_wrong_in_a_thread_is_told() -> None:
    pool = TokenizerPool(Slow(10_000.0, ValueError("bad")))
    done: asyncio.Future[list[array[int]]] = asyncio.get_running_loop().create_future()
    pool.encode(["a"], Receiver(done), add_special_tokens=False)
    with pytest.raises(ValueError, match="bad"):
        await done
    pool.close()


async def test_what_goes_wrong_after_a_thread_is_told_as_well() -> None:
    pool = TokenizerPool(Slow(10_000.0))
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def done(_ids: list[int]) -> None:
        raise ValueError("bad")

    pool.later(lambda: [1], done, told.set_result)
    assert str(await told) == "bad"
    pool.close()


async def test_too_many_long_prompts_are_refused() -> None:
    pool = TokenizerPool(Slow(10_000.0))
    loop = asyncio.get_running_loop()
    waiting = [loop.create_future() for _ in range(256)]

    def encode(done: asyncio.Future[list[array[int]]]) -> None:
        pool.encode(["a"], Receiver(done), add_special_tokens=False)

    for done in waiting:
        encode(done)
    with pytest.raises(CapacityError) as refused:
        encode(loop.create_future())
    assert refused.value.code == "tokenizer_busy"
    await asyncio.gather(*waiting)
    more = loop.create_future()
    encode(more)
    assert await more == [array("I", [1])]
    pool.close()


def test_long_and_wide_texts_are_known_to_take_longer(tiny: Reference) -> None:
    fast = ModelTokenizer(ProvenEncoder(Liar(tiny, wrong="\0"), lambda: tiny), None)
    slow = ModelTokenizer(tiny, None)

    def work(tokenizer: ModelTokenizer, text: str) -> float:
        return tokenizer.begin([text], add_special_tokens=False).work_us

    assert work(fast, "a" * 1000) < work(fast, "東" * 1000) < work(slow, "a" * 1000)
    assert work(fast, "a" * 2000) == 2 * work(fast, "a" * 1000)


def test_every_size_is_a_series_of_its_model() -> None:
    metrics = Metrics(registry := CollectorRegistry(), ["a", "b"])
    assert not [family.name for family in registry.collect() if family.name.startswith("kvasir_token")]
    metrics.track_tokenizer("a", lambda: TokenizerStats(fast=True, failures=3))
    metrics.track_tokenizer("b", lambda: TokenizerStats(fast=False, evicted_segments=5))
    found = {
        (sample.name, sample.labels["model"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if family.name.startswith("kvasir_token")
    }
    assert found["kvasir_tokenizer_fast", "a"] == 1
    assert found["kvasir_tokenizer_fast", "b"] == 0
    assert found["kvasir_tokenizer_failures_total", "a"] == 3
    assert found["kvasir_token_cache_evicted_segments_total", "b"] == 5
