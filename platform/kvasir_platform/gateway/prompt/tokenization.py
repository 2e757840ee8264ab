"""Converts text to token ids without blocking the streams that share the event loop.

Work of a fraction of a millisecond runs on the event loop, where a thread would cost more than the work.
Longer work goes to a small thread pool: the tokenizers release the GIL.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from kvasir.checkpoint.consistency import embedded_tokens
from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.spec.edge import TokenizerSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.values import value
from kvasir.telemetry.tokenizer_series import TokenizerStats
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens, UserText, control_tokens
from kvasir_platform.gateway.prompt.fast_tokenizer import ProvenEncoder, Reference, load_encoder
from kvasir_platform.gateway.prompt.prefix_tokens import (
    MIN_CHARS,
    Pieces,
    PrefixCounts,
    PrefixTokens,
    cut_marker,
)

_log = logging.getLogger(__name__)

_INLINE_US = 500.0
"""Maximum work on the event loop; a thread costs a fifth of that and a wake-up."""
_FAST_US = 0.007
_FAST_WIDE_US = 0.06
_REFERENCE_US = 0.6
"""Microseconds per character: of the fast tokenizer for ASCII and for other text, and of the reference."""
_DECODE_US = 0.5
"""Microseconds per token, of either tokenizer."""
_LOOK_UP_CHARS = 512 << 10
"""Longer texts are not looked up on the event loop."""
_FAST_THREADS = 1
_REFERENCE_THREADS = 2
"""The fast tokenizer uses 40 MB per calling thread, and one thread suffices: few clients send such texts."""
_MAX_PENDING = 256


_T = TypeVar("_T")


@value
class Encoding:
    """An encoding in progress. `finish` returns the ids of each text, may be called once and in any thread,
    and takes about `work_us` microseconds."""

    work_us: float
    finish: Callable[[], list[array[int]]]


class Tokenizer(Protocol):
    """The interface of a model's tokenizer. Thread-safe."""

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        ...

    @property
    def template(self) -> ChatTemplate | None:
        """None when the model is no chat model."""
        ...

    @property
    def control(self) -> ControlTokens | None:
        """The special tokens, if they can be told apart from text that reads like them: each UserText is
        then tokenized accordingly."""
        ...

    def begin(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> Encoding:
        """Start an encoding: look up the cached tokens of texts under `salt`."""
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> list[array[int]]:
        """Return the ids of each text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`, which are below `vocabulary`."""
        ...

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary entry of each id, empty for unused ids."""
        ...

    def sizes(self) -> TokenizerStats:
        """Return the statistics."""
        ...


class ModelTokenizer:
    """The tokenizer and chat template of a model folder; `prefixes` caches the tokens of earlier turns. The
    model has embeddings of `embedded` tokens, None if of all: another token would end its engine, and is
    refused."""

    def __init__(
        self,
        encoder: Reference | ProvenEncoder,
        template: ChatTemplate | None,
        prefixes: PrefixTokens | None = None,
        control: ControlTokens | None = None,
        embedded: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._prefixes = prefixes
        self.control = control
        self.template = template
        self.vocabulary = min(encoder.vocabulary, encoder.vocabulary if embedded is None else embedded)
        self._has_more = self.vocabulary < encoder.vocabulary

    @classmethod
    def from_folder(
        cls, folder: Path, spec: TokenizerSpec | None = None, template: str | None = None
    ) -> ModelTokenizer:
        """Load tokenizer.json and the chat template, or use `template` instead of the model's. Without a
        `spec`, use only Hugging Face's tokenizer. Raise ConfigError naming the invalid file."""
        path = folder / "tokenizer.json"
        chat = ChatTemplate.from_folder(folder, template)
        embedded = embedded_tokens(read_model_config(folder)) if (folder / "config.json").is_file() else None
        if spec is None:
            return cls(Reference.from_file(path), chat, embedded=embedded)
        conversation = _conversation(chat)
        encoder = load_encoder(path, conversation, fast=spec.fast == "auto")
        rules = path.read_bytes()
        control = control_tokens(rules)
        if control is None or not control.cuts:
            _log.warning(
                "control tokens in %s of clients are not escaped: this tokenizer does not allow it",
                "texts" if control is None else "messages",
                extra={"tokenizer": str(path)},
            )
        if control is not None and isinstance(encoder, Reference):
            # A client's text must not be what loads it.
            encoder.splitting()
        marker = cut_marker(rules, conversation)
        keeps = marker is not None and spec.prefix_cache_bytes > 0
        prefixes = PrefixTokens(marker, spec.prefix_cache_bytes) if marker is not None and keeps else None
        return cls(encoder, chat, prefixes, control, embedded)

    def begin(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> Encoding:
        """See `Tokenizer`."""
        if sum(map(len, texts)) > _LOOK_UP_CHARS:
            return Encoding(
                self._work_us(texts),
                lambda: self.encode(texts, add_special_tokens=add_special_tokens, salt=salt),
            )
        return self._begin(texts, add_special_tokens, salt)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, salt: str = "") -> list[array[int]]:
        """See `Tokenizer`."""
        return self._begin(texts, add_special_tokens, salt).finish()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See `Tokenizer`."""
        return self._encoder.decode(ids, skip_special_tokens=skip_special_tokens)

    def names(self, ids: Sequence[int]) -> list[str]:
        """See `Tokenizer`."""
        return [name or "" for name in self._encoder.names(ids)]

    def sizes(self) -> TokenizerStats:
        """See `Tokenizer`."""
        prefixes = PrefixCounts() if self._prefixes is None else self._prefixes.counts()
        return TokenizerStats(
            fast=self._encoder.fast,
            failures=self._encoder.failures,
            cached_segments=prefixes.entries,
            cached_bytes=prefixes.bytes,
            found_characters=prefixes.found,
            missed_characters=prefixes.missed,
            evicted_segments=prefixes.evicted,
        )

    def _begin(self, texts: Sequence[str], add_special_tokens: bool, salt: str) -> Encoding:
        begun = self._begun(texts, add_special_tokens, salt)
        return Encoding(begun.work_us, lambda: self._embedded(begun.finish())) if self._has_more else begun

    def _embedded(self, found: list[array[int]]) -> list[array[int]]:
        """Return `found`. Raise RequestError for a token that the model has no embedding of."""
        highest = max((max(ids) for ids in found if ids), default=0)
        if highest >= self.vocabulary:
            (name,) = self.names([highest])
            raise RequestError(f"The model has no embedding of the token {name!r} ({highest}).")
        return found

    def _begun(self, texts: Sequence[str], add_special_tokens: bool, salt: str) -> Encoding:
        control = self.control
        if control is not None and UserText in map(type, texts):
            return Encoding(
                self._work_us(texts),
                lambda: [self._apart(control, text, add_special_tokens) for text in texts],
            )
        prefixes = self._prefixes
        # Special tokens are added to the whole text, not to its segments.
        if prefixes is None or add_special_tokens or all(len(text) < MIN_CHARS for text in texts):
            return Encoding(self._work_us(texts), lambda: self._whole(texts, add_special_tokens))
        pieces = [prefixes.cut(text, salt) for text in texts]
        missing = [part for piece in pieces for part in piece.missing()]
        return Encoding(self._work_us(missing), lambda: self._joined(prefixes, pieces, missing))

    def _whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
        made = self._encoder.encode(texts, add_special_tokens=add_special_tokens)
        return [array("I", ids) for ids in made]

    def _apart(self, control: ControlTokens, text: str, add_special_tokens: bool) -> array[int]:
        """Return the ids of a text, with those that clients wrote in a UserText as ordinary ones."""
        encode = self._encoder.encode
        if not isinstance(text, UserText) or not text.mark:
            (ids,) = encode(
                [text], add_special_tokens=add_special_tokens, ordinary=isinstance(text, UserText)
            )
            return array("I", ids)
        pieces = control.pieces(text)
        made = [b""] * len(pieces)
        for ordinary in (False, True):
            at = [i for i, piece in enumerate(pieces) if piece.ordinary is ordinary]
            texts = [pieces[i].text for i in at]
            for i, ids in zip(at, encode(texts, add_special_tokens=False, ordinary=ordinary), strict=True):
                made[i] = ids
        before, after = self._around() if add_special_tokens else (b"", b"")
        return array("I", b"".join((before, *made, after)))

    def _around(self) -> tuple[bytes, bytes]:
        """Return the ids that are added before and after a text."""
        (bare,) = self._encoder.encode(["x"], add_special_tokens=False)
        (whole,) = self._encoder.encode(["x"], add_special_tokens=True)
        before, _, after = whole.partition(bare)
        return before, after

    def _joined(
        self, prefixes: PrefixTokens, pieces: Sequence[Pieces], missing: Sequence[str]
    ) -> list[array[int]]:
        remaining = iter(self._encoder.encode(missing, add_special_tokens=False) if missing else ())
        return [
            array("I", b"".join(prefixes.keep(piece, list(islice(remaining, piece.known.count(None))))))
            for piece in pieces
        ]

    def _work_us(self, texts: Sequence[str]) -> float:
        if not self._encoder.fast:
            return _REFERENCE_US * sum(map(len, texts))
        return sum(len(text) * (_FAST_US if text.isascii() else _FAST_WIDE_US) for text in texts)


class EncodingReceiver(Protocol):
    """Receives the ids of its texts: exactly one of the two methods is called, on the event loop."""

    def encoded(self, ids: list[array[int]]) -> None:
        """The ids of each text."""
        ...

    def failed(self, error: BaseException) -> None:
        """Handle a failure."""
        ...


class DecodingReceiver(Protocol):
    """Receives a text: exactly one of the two methods is called, on the event loop."""

    def decoded(self, text: str) -> None:
        """The text of the ids."""
        ...

    def failed(self, error: BaseException) -> None:
        """Handle a failure."""
        ...


class TokenizerPool:
    """Runs a tokenizer on the event loop or in a thread, by the estimated work."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        threads = _FAST_THREADS if tokenizer.sizes().fast else _REFERENCE_THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._pending = 0

    def encode(
        self, texts: Sequence[str], receiver: EncodingReceiver, *, add_special_tokens: bool, salt: str = ""
    ) -> None:
        """Pass the ids to `receiver`, immediately if the work is small, else later on this event loop. The
        response time reveals to callers of one `salt` what others of that salt sent. Raise CapacityError if
        too many texts are queued."""
        encoding = self.tokenizer.begin(texts, add_special_tokens=add_special_tokens, salt=salt)
        if encoding.work_us <= _INLINE_US:
            receiver.encoded(encoding.finish())
        else:
            self.later(encoding.finish, receiver.encoded, receiver.failed)

    def decode(self, ids: Sequence[int], receiver: DecodingReceiver) -> None:
        """Pass the text of `ids`, including special tokens, to `receiver`, as `encode` does. Raise
        CapacityError as `encode` does."""
        if len(ids) * _DECODE_US <= _INLINE_US:
            receiver.decoded(self.tokenizer.decode(ids))
        else:
            self.later(lambda: self.tokenizer.decode(ids), receiver.decoded, receiver.failed)

    def later(
        self,
        work: Callable[[], _T],
        done: Callable[[_T], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Run `work` in a thread, and call `done` on this event loop; `failed` with what either raises. Raise
        CapacityError if too many are queued."""
        if self._pending >= _MAX_PENDING:
            raise CapacityError("Too many long prompts wait to be tokenized.", code="tokenizer_busy")
        self._pending += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def ended(future: asyncio.Future[_T]) -> None:
            self._pending -= 1
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                try:
                    done(future.result())
                # Nobody else would hear of it: the event loop called this.
                except Exception as fault:  # noqa: BLE001
                    error = fault
            if error is not None:
                failed(error)

        working.add_done_callback(ended)

    def close(self) -> None:
        """Stop the threads; queued texts are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _conversation(template: ChatTemplate | None) -> str:
    """Return a sample chat rendered by the model's template, empty if there is no template or it rejects the
    chat."""
    if template is None:
        return ""
    turns = (("user", "Hello there!"), ("assistant", " How can I help? "), ("user", "Tell me\n\n a story."))
    try:
        return template.render([{"role": role, "content": text} for role, text in turns], {})
    except RequestError:
        return ""
