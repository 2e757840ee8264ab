"""The fast tokenizer, used only where it was verified to return the tokens of Hugging Face's.

A tokenizer that differs in one token lowers quality without an error. So Hugging Face's library is the
reference: when a model is loaded, both encode and decode the same texts, chosen to reveal differences, and on
any difference the reference is used. The reference is freed after the check, since it takes as much memory as
the fast one, and loaded again if the fast one fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as HfTokenizer

from kvasir.core.errors import ConfigError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_ODD = 8
_SAMPLED_IDS = 4096
_RANDOM_TEXTS = 128
_TEXTS = (
    "",
    " ",
    "\n",
    "Hello, world! It's we'll THEY'RE don't I'M you'VE he'd 'tis '' 's",
    "  two  spaces   three\tand\t\ttabs \n\n\n lines \r\n \r\n end   ",
    "0 12 345 6789 12345678901234567890 3.14159 1,000,000 ½ ² ٣ Ⅷ 0x1F",
    'def f(x: int) -> str:\n    return f"{x!r}"  # ok\n\n\tif (a<=b&&c!=d){e[i]->g++;}',
    '{"a": [1, 2.5e-3, null], "b\\n": "\\u00e9"}\n<div class="x">&amp;</div>\n```sh\n$ ls -la | wc\n```',
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file.txt snake_case camelCase",
    "Ünïcödé naïve Straße ŒUVRE İstanbul ǆ ﬁ ﬀ Ǽ́ e\u0301 a\u0308\u0323 \u212b \u1e9b\u0323 Å Å",
    "東京都は日本の首都です。今日は、いい天気ですね！ 中文文本，没有空格。 한국어 텍스트 조합ㅎㅏㄴ",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก გამარჯობა",
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☃️ ❤️‍🔥 𝒳𝔘 𐍈 \U0010fffd",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u200d\u2028line\u2029par\ufeffbom\x85nel\x0bvt\x0cff\x00nul\x7f",
    "…—–“”‘’«»¿¡·•°±×÷€£¥©®™ …!!! ??? ---- ==== **** ____ ~~~~ \\\\\\ ///",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ab" * 300 + "xyzzy" * 100 + " " * 200 + "\n" * 100 + "é" * 100 + "!" * 100,
)
_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz ",
    "eEtTaAoO'sS’ ",
    " \t\n\r\u00a0\u3000",
    "0123456789.,- ",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ",
    "éüñßøÉŒ\u0301\u0308\u0323ạ ",
    "的一是不了人我在有他 、。ひらカタ한글",
    "абвгд αβγ אבג عرب कखग ",
    "🙂👍🏽\u200d\ufe0f🇩🇪𝒳 ",
)


_SEPARATING = (
    *(range(0x21), range(0x7F, 0xA1), (0xAD, 0x61C, 0x6DD, 0x70F, 0x8E2, 0x1680, 0x180E)),
    *(range(0x600, 0x606), (0x890, 0x891), range(0x2000, 0x2010), range(0x2028, 0x2030)),
    *(range(0x205F, 0x2070), (0x3000, 0xFEFF), range(0xFFF9, 0xFFFC), (0x110BD, 0x110CD)),
    *(range(0x13430, 0x13440), range(0x1BCA0, 0x1BCA4), range(0x1D173, 0x1D17B)),
    *((0xE0001,), range(0xE0020, 0xE0080)),
)
"""Unicode's white space, line separators, control and format characters: regular expression libraries differ
most on them."""
_LETTERS = (range(0x21, 0x3400, 16), range(0x3400, 0xD800, 256), range(0xE000, 0x20000, 256))
_AROUND = "a{0}b 1{0}2  {0}x\n{0} !{0}'{0}  {0}{0}"


def encoded_pair(path: Path, first: str, second: str) -> tuple[list[int], list[int], list[int | None]]:
    """Return the ids of two texts as the tokenizer in a file encodes a pair, the type of each, and which of
    the two it is of, None for neither."""
    made = HfTokenizer.from_file(str(path)).encode(first, second)
    return made.ids, made.type_ids, made.sequence_ids


class Encoder(Protocol):
    """Converts text to ids and back. Thread-safe."""

    @property
    def vocabulary(self) -> int:
        """Upper bound of ids, exclusive."""
        ...

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
    ) -> list[bytes]:
        """Return the ids of each text, as native uint32. `ordinary`: special tokens in texts are ordinary
        text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; unknown ids add nothing."""
        ...

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary entry of each id, None for unknown ids."""
        ...


class Reference:
    """Hugging Face's tokenizer."""

    fast = False
    failures = 0

    def __init__(self, tokenizer: HfTokenizer) -> None:
        # Its threads would compete with other requests for cores, and keep their memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._splitting: HfTokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: Path) -> Reference:
        """Raise ConfigError naming the file."""
        try:
            return cls(HfTokenizer.from_file(str(path)))
        # The library raises a bare Exception for every error in the file.
        except Exception as error:
            raise ConfigError(f"{path}: cannot load the tokenizer: {error}") from error

    @property
    def vocabulary(self) -> int:
        """See `Encoder`."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def splitting(self) -> HfTokenizer:
        """Return a second instance, for which special tokens in texts are ordinary text: that is a setting of
        an instance. The first call takes as long as loading the tokenizer."""
        with self._lock:
            if self._splitting is None:
                self._splitting = HfTokenizer.from_str(self.tokenizer.to_str())
                self._splitting.encode_special_tokens = True
            return self._splitting

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
    ) -> list[bytes]:
        """See `Encoder`."""
        tokenizer = self.splitting() if ordinary else self.tokenizer
        # Only the batch call releases the GIL, and `fast` omits offsets.
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [array("I", encoding.ids).tobytes() for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Encoder`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """See `Encoder`."""
        return [self.tokenizer.id_to_token(token) for token in ids]


class Fast:
    """The `fastokens` library. Raise ImportError if it is not installed, and the library's own error if it
    does not support the tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        # Environment variables are the only settings. One thread per encoding, since the rest serve others;
        # no cache of whole texts, since all tenants would share it.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        os.environ.update(FASTOKENS_INPUT_CACHE="0", FASTOKENS_SEGMENT_CACHE="0")
        from fastokens import Tokenizer

        self._tokenizer: Any = Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocabulary(self) -> int:
        """See `Encoder`."""
        return int(self._tokenizer.vocab_size)

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
    ) -> list[bytes]:
        """See `Encoder`."""
        flat, bounds = self._tokenizer.encode_batch_flat(
            list(texts), add_special_tokens=add_special_tokens, split_special_tokens=ordinary
        )
        if len(texts) == 1:
            return [flat]
        ends = array("Q", bounds)
        return [flat[4 * ends[i] : 4 * ends[i + 1]] for i in range(len(texts))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Encoder`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """See `Encoder`."""
        return [self._tokenizer.id_to_token(token) for token in ids]


class ProvenEncoder:
    """The fast encoder, with the reference for texts that contain one of the characters `odd` and for texts
    at which the fast one fails. `reload` loads the reference again."""

    fast = True

    def __init__(
        self,
        fast: Encoder,
        reload: Callable[[], Encoder],
        *,
        odd: str = "",
        reference: Encoder | None = None,
    ) -> None:
        self._fast = fast
        self._reload = reload
        self._odd = odd
        self._reference = reference
        self._lock = threading.Lock()
        self.failures = 0

    @property
    def vocabulary(self) -> int:
        """See `Encoder`."""
        return self._fast.vocabulary

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, ordinary: bool = False
    ) -> list[bytes]:
        """See `Encoder`."""
        if self._odd and any(odd in text for text in texts if not text.isascii() for odd in self._odd):
            return self._load().encode(texts, add_special_tokens=add_special_tokens, ordinary=ordinary)
        return self._run(
            lambda encoder: encoder.encode(texts, add_special_tokens=add_special_tokens, ordinary=ordinary)
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Encoder`."""
        return self._run(lambda encoder: encoder.decode(ids, skip_special_tokens=skip_special_tokens))

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """See `Encoder`."""
        return self._run(lambda encoder: encoder.names(ids))

    def _run(self, use: Callable[[Encoder], _T]) -> _T:
        try:
            return use(self._fast)
        # A panic of the library is not an Exception, and the text may be valid.
        except BaseException as error:
            if not _is_fault(error):
                raise
            self.failures += 1
            _log.warning("the fast tokenizer failed; the reference serves", extra={"error": repr(error)})
        return use(self._load())

    def _load(self) -> Encoder:
        with self._lock:
            if self._reference is None:
                self._reference = self._reload()
            return self._reference


def load_encoder(path: Path, conversation: str, *, fast: bool = True) -> Reference | ProvenEncoder:
    """Return the encoder of a tokenizer.json: the fast one if `fast` and it was verified against the
    reference. `conversation` is a rendered chat, "" without a template. Raise ConfigError naming the file."""
    reference = Reference.from_file(path)
    if not fast:
        return reference
    odd = ""
    try:
        quick = Fast(reference.tokenizer.to_str())
        odd = odd_characters(reference, quick)
        difference = find_difference(reference, quick, conversation, odd)
    except ImportError:
        difference = "fastokens is not installed"
    # The library rejects unsupported tokenizers with many kinds of errors, including a panic.
    except BaseException as error:
        if not _is_fault(error):
            raise
        difference = repr(error)
    if difference is not None:
        _log.warning(
            "this model is tokenized with the slower reference",
            extra={"tokenizer": str(path), "reason": difference},
        )
        return reference
    digest = file_digest(path)

    def reload() -> Reference:
        if file_digest(path) != digest:
            raise ConfigError(f"{path}: the tokenizer has changed since the start; restart")
        return Reference.from_file(path)

    if odd:
        # Any client may send them, and loading the reference blocks the event loop for a moment.
        _log.info(
            "texts with some characters are tokenized by the reference", extra={"characters": ascii(odd)}
        )
        return ProvenEncoder(quick, reload, odd=odd, reference=reference)
    del reference
    return_memory()
    return ProvenEncoder(quick, reload)


def odd_characters(reference: Reference, fast: Encoder) -> str:
    """Return the single characters that `fast` encodes differently, among those most likely to differ."""
    codes = sorted({code for group in (*_SEPARATING, *_LETTERS) for code in group})
    texts = [_AROUND.format(chr(code)) for code in codes]
    expected = reference.encode(texts, add_special_tokens=False)
    found = fast.encode(texts, add_special_tokens=False)
    pairs = zip(codes, expected, found, strict=True)
    return "".join(chr(code) for code, ids, other in pairs if ids != other)


def find_difference(reference: Reference, fast: Encoder, conversation: str, odd: str = "") -> str | None:
    """Return a description of the first difference between the two, ignoring texts with one of the characters
    `odd`, or None. Takes about 0.3 s."""
    if reference.vocabulary != fast.vocabulary:
        return f"vocabularies of {reference.vocabulary} and {fast.vocabulary}"
    if len(odd) > _MAX_ODD or any(char.isascii() for char in odd):
        return f"other tokens for the characters {odd[:64]!r}"
    sample = sorted({*range(0, reference.vocabulary, max(1, reference.vocabulary // _SAMPLED_IDS))})
    if reference.names(sample) != fast.names(sample):
        return "the vocabularies differ"
    for text in _proof_texts(reference, sample, conversation):
        if any(char in text for char in odd):
            continue
        for special in (False, True):
            ids = reference.encode([text], add_special_tokens=special)[0]
            if ids != fast.encode([text], add_special_tokens=special)[0]:
                return f"other tokens for {text[:64]!r}, add_special_tokens={special}"
            for skip in (False, True):
                shown = reference.decode(array("I", ids), skip_special_tokens=skip)
                if shown != fast.decode(array("I", ids), skip_special_tokens=skip):
                    return f"another text of the tokens of {text[:64]!r}, skip_special_tokens={skip}"
    return _ordinary_difference(reference, fast, odd)


def _ordinary_difference(reference: Reference, fast: Encoder, odd: str) -> str | None:
    """Return the first difference for special tokens as ordinary text. Nothing else may use `reference`."""
    texts = [text for text in _special_texts(reference) if not any(char in text for char in odd)]
    reference.tokenizer.encode_special_tokens = True
    try:
        expected = reference.encode(texts, add_special_tokens=True)
    finally:
        reference.tokenizer.encode_special_tokens = False
    found = fast.encode(texts, add_special_tokens=True, ordinary=True)
    differing = (text for text, ids, other in zip(texts, expected, found, strict=True) if ids != other)
    text = next(differing, None)
    return None if text is None else f"other tokens for {text[:64]!r} as ordinary text"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _proof_texts(reference: Reference, sample: Sequence[int], conversation: str) -> Iterator[str]:
    yield from _TEXTS
    yield "".join(_TEXTS)
    yield conversation
    yield from _special_texts(reference)
    # Every part of the vocabulary, at the beginning of a word and within others.
    for at in range(0, len(sample), 32):
        shown = [reference.decode([token], skip_special_tokens=False) for token in sample[at : at + 32]]
        yield "".join(shown)
        yield " ".join(shown)
    # The same texts at every start, so that one check is valid for every replica.
    rng = random.Random(0)  # noqa: S311
    for _ in range(_RANDOM_TEXTS):
        letters = "".join(rng.choices(_ALPHABETS, k=rng.randint(1, 3)))
        yield "".join(rng.choices(letters, k=rng.randint(1, 200)))


def _special_texts(reference: Reference) -> Iterator[str]:
    added = [token.content for token in reference.tokenizer.get_added_tokens_decoder().values()]
    for at in range(0, len(added), 16):
        some = added[at : at + 16]
        yield "".join(f"a{token}b {token} c\n{token}\n\n{token}{token[:-1]} {token[1:]}" for token in some)
        yield "".join(some)


def _is_fault(error: BaseException) -> bool:
    """Return whether the library failed, rather than its caller or the process."""
    return not isinstance(error, KeyboardInterrupt | SystemExit | UnicodeError | OverflowError | TypeError)


def return_memory() -> None:
    """Return the memory used for loading to the system: many small allocations, which the C library would
    keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
