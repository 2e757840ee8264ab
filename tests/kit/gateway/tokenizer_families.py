"""Small tokenizers with the structure of well-known models' tokenizers, trained quickly on local text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = Path(__file__).resolve().parents[3]
SPECIALS = ("<|bos|>", "<|user|>", "<|end|>", "<|endoftext|>")
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _bytes_only() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _corpus() -> list[str]:
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").glob("*.py"))]
    return [*(path.read_text(encoding="utf-8") for path in files[:24]), "東京都は日本の首都です。\n" * 40]


def _byte_level(tokenizer: Tokenizer, size: int = 1500) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return _finish(tokenizer)


def _finish(tokenizer: Tokenizer, specials: tuple[str, ...] = SPECIALS) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    bos = tokenizer.token_to_id(specials[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{specials[0]} $A", pair=f"{specials[0]} $A $B", special_tokens=[(specials[0], bos)]
    )
    return tokenizer


def gpt2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(tokenizer)


def roberta() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _byte_level(tokenizer)


def llama3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_split(GPT4), _bytes_only()])
    return _byte_level(tokenizer)


def qwen() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_split(QWEN), _bytes_only()])
    return _byte_level(tokenizer)


def deepseek() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = [*(_split(pattern) for pattern in DEEPSEEK), _bytes_only()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return _byte_level(tokenizer)


def digits() -> Tokenizer:
    """With the structure of kvasir-tiny's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return _byte_level(tokenizer)


def stripping() -> Tokenizer:
    """Added tokens that absorb white space, need word boundaries or match normalized text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _byte_level(tokenizer)
    tokenizer.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False),
            AddedToken("<|tail|>", rstrip=True, normalized=False),
            AddedToken("alone", single_word=True, normalized=False),
            AddedToken("é!", normalized=True),
        ]
    )
    return tokenizer


def _sentencepiece(tokenizer: Tokenizer) -> Tokenizer:
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, special_tokens=["<unk>", *alphabet])
    tokenizer.train_from_iterator(_corpus(), trainer)
    return _finish(tokenizer)


def llama2() -> Tokenizer:
    """SentencePiece's BPE in its first conversion: spaces by normalizers, no words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), behavior="merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _sentencepiece(tokenizer)


def mistral() -> Tokenizer:
    """SentencePiece's BPE with a space only at the text's beginning."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=True)
    return _sentencepiece(tokenizer)


def t5() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=800, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(_corpus()[:6], trainer)
    return _finish(tokenizer)


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=1500, show_progress=False, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(_corpus(), trainer)
    return _finish(tokenizer)


FAMILIES: tuple[Callable[[], Tokenizer], ...] = (
    gpt2,
    roberta,
    llama3,
    qwen,
    deepseek,
    digits,
    stripping,
    llama2,
    mistral,
    t5,
    bert,
)

PROVABLE = tuple(make for make in FAMILIES if make not in (mistral, t5, bert, stripping))
"""The families that the fast tokenizer reproduces."""

CUT = tuple(make for make in FAMILIES if make is not mistral)
"""The families whose texts may be cut at special tokens."""


def _each(families: tuple[Callable[[], Tokenizer], ...]) -> pytest.MarkDecorator:
    quick = (llama3, digits)
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(make, id=make.__name__, marks=() if make in quick else pytest.mark.slow)
            for make in families
        ],
    )


EACH_FAMILY = _each(FAMILIES)
EACH_CUT = _each(CUT)
EACH_PROVABLE = _each(PROVABLE)

WORDS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.text("abc déÉ é!?'sSt\n\r\t 0123.,<|end>東🙂\u0301\u00a0", max_size=60),
    st.sampled_from(
        (*SPECIALS, "<|end", "|>", " ", "\n", "<mask>", "<|tail|>", "alone", "é!", " the thing's ")
    ),
)
TEXTS = st.lists(WORDS, max_size=12).map("".join)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def tokenizer_json(make: Callable[[], Tokenizer]) -> str:
    """The family's tokenizer.json."""
    return make().to_str()
