"""Text to token ids, without stalling the streams that share the event loop.

Short prompts are encoded in place, where handing them to a thread would cost more than the work. Longer
ones go to a small pool of threads: the tokenizer releases the interpreter's lock while it works.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as HfTokenizer

from kvasir.core.errors import CapacityError, ConfigError
from kvasir.core.requests import token_ids
from kvasir_platform.gateway.chat_template import ChatTemplate

_INLINE_CHARS = 2048
"""About 0.3 ms of work; a thread costs a third of that and a wake-up."""
_THREADS = 2
_MAX_PENDING = 256


class Tokenizer(Protocol):
    """What the edge needs to know of a model's tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        ...

    @property
    def template(self) -> ChatTemplate | None:
        """None when the model is no chat model."""
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[array[int]]:
        """Ids of each text. Thread-safe."""
        ...


class ModelTokenizer:
    """The fast tokenizer and chat template of a model folder."""

    def __init__(self, tokenizer: HfTokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelTokenizer:
        """Load tokenizer.json and the chat template. Raises ConfigError naming the file at fault."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = HfTokenizer.from_file(str(path))
        # The library raises bare Exception for every fault of the file.
        except Exception as error:
            raise ConfigError(f"{path}: cannot load the tokenizer: {error}") from error
        return cls(tokenizer, ChatTemplate.from_folder(folder))

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[array[int]]:
        """Ids of each text."""
        # Only the batch call releases the interpreter's lock, and `fast` leaves out offsets.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [token_ids(encoding.ids) for encoding in encodings]


class TokenizerPool:
    """Runs a tokenizer in place or in a thread, by the length of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._pending = 0

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        then: Callable[[list[array[int]]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Call `then` with the ids, at once for short texts, else later on this event loop; or `failed`
        if that went wrong later. Raises CapacityError when too many texts wait."""
        if sum(map(len, texts)) <= _INLINE_CHARS:
            then(self.tokenizer.encode(texts, add_special_tokens=add_special_tokens))
            return
        if self._pending >= _MAX_PENDING:
            raise CapacityError("Too many long prompts wait to be tokenized.", code="tokenizer_busy")
        self._pending += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self.tokenizer.encode(texts, add_special_tokens=add_special_tokens)
        )

        def done(future: asyncio.Future[list[array[int]]]) -> None:
            self._pending -= 1
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                then(future.result())
            else:
                failed(error)

        work.add_done_callback(done)

    def close(self) -> None:
        """Let the threads go; texts that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
