"""CPU of converting a request's text into tokens and block hashes, with a vocabulary of realistic size.

`prompt` rows are the cost of a chat from its JSON to its block hashes: decoding, the chat template,
tokenizing and hashing. `tokens` rows are the tokenizing part, compared with Hugging Face's tokenizer in the
same run on the same texts. Cold texts are all different; a warm text is a conversation whose earlier turns
were tokenized before.

    make bench-tokenizing
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import psutil

from kvasir.config.spec.edge import TokenizerSpec
from kvasir.native import IS_NATIVE, chain_hashes, root_hash
from kvasir_platform.gateway.openai.calls import chat_call
from kvasir_platform.gateway.openai.schema.decode import decode_chat
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
from load_tests.options import no_options
from load_tests.report import Row, median, write
from load_tests.vocabulary import MERGED, large_model, sources, vocabulary_hash

SIZES = (("100 B", 100, 400, 0.20), ("16 KiB", 16 << 10, 40, 0.45), ("128 KiB", 128 << 10, 10, 2.5))
REPEATS = 5
BLOCK = 16
TURNS = 32
WARM_TARGET_MS = 0.6

Chat = list[dict[str, str]]
T = TypeVar("T")


def texts() -> Iterator[str]:
    """Sources, beginning with those that the vocabulary was trained on last or not at all."""
    for path in reversed(sources()):
        text = path.read_text(encoding="utf-8", errors="ignore")
        for at in range(0, len(text), 64 << 10):
            yield text[at : at + (64 << 10)]


class Texts:
    """Distinct texts of a given length."""

    def __init__(self) -> None:
        self._more = texts()
        self._rest = ""

    def take(self, chars: int) -> str:
        """The next `chars` characters, each returned once."""
        while len(self._rest) < chars:
            self._rest += next(self._more)
        taken, self._rest = self._rest[:chars], self._rest[chars:]
        return taken

    def chat(self, chars: int, turns: int) -> Chat:
        """A conversation of about `chars` characters."""
        roles = itertools.cycle(("user", "assistant"))
        return [
            {"role": role, "content": self.take(chars // turns)} for role in itertools.islice(roles, turns)
        ]


def body(chat: Chat) -> bytes:
    """The request body of a chat."""
    return json.dumps({"model": "m", "messages": chat}).encode()


class Edge:
    """From a request's body to its block hashes, as the edge does it."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._root = root_hash("m")

    def prompt(self, raw: bytes) -> str:
        """The rendered prompt."""
        call = chat_call(decode_chat(raw), self._tokenizer.template, self._tokenizer.vocabulary)
        prompt = call.prompts[0]
        assert isinstance(prompt, str)
        return prompt

    def tokens(self, prompt: str) -> array[int]:
        """Its token ids."""
        return self._tokenizer.encode([prompt], add_special_tokens=False)[0]

    def names(self, raw: bytes) -> array[int]:
        """All steps."""
        return chain_hashes(self.tokens(self.prompt(raw)), BLOCK, self._root)


def cpu_ms(do: Callable[[T], object], items: Sequence[T]) -> float:
    """CPU milliseconds of one item."""
    gc.collect()
    began = time.process_time()
    for item in items:
        do(item)
    return (time.process_time() - began) / len(items) * 1e3


def cold_rows(edge: Edge, reference: Edge, fresh: Texts, note: str) -> list[Row]:
    """Cost of texts that were not sent before."""
    rows = []
    for name, size, count, target in SIZES:
        turns = 1 if size <= 100 else TURNS
        whole, alone, slow = [], [], []
        for _ in range(REPEATS):
            whole.append(cpu_ms(edge.names, [body(fresh.chat(size, turns)) for _ in range(count)]))
            prompts = [edge.prompt(body(fresh.chat(size, turns))) for _ in range(count)]
            alone.append(cpu_ms(edge.tokens, prompts))
            slow.append(cpu_ms(reference.tokens, prompts[: max(2, count // 4)]))
            if any(edge.tokens(prompt) != reference.tokens(prompt) for prompt in prompts[:2]):
                raise RuntimeError("the tokenizers differ")
        value, spread = median(whole)
        rows.append(
            Row(f"prompt, {name}, cold", value, "CPU ms", "lower", target=target, spread=spread, note=note)
        )
        value, spread = median(alone)
        peer, _ = median(slow)
        rows.append(
            Row(
                f"tokens, {name}, cold",
                value,
                "CPU ms",
                "lower",
                peer=peer,
                ratio=value / peer,
                spread=spread,
                note="peer: Hugging Face tokenizers",
            )
        )
    return rows


def warm_rows(edge: Edge, fresh: Texts) -> list[Row]:
    """Cost of the next turn of a long conversation whose earlier turns were tokenized."""
    rows = []
    whole, alone = [], []
    for _ in range(REPEATS):
        later = []
        for _ in range(10):
            chat = fresh.chat(128 << 10, TURNS)
            edge.names(body(chat))
            later.append(
                body([*chat, {"role": "assistant", "content": fresh.take(1000)}, *fresh.chat(200, 1)])
            )
        prompts = [edge.prompt(raw) for raw in later]
        whole.append(cpu_ms(edge.names, later[::2]))
        alone.append(cpu_ms(edge.tokens, prompts[1::2]))
    for name, samples, target in (("prompt", whole, WARM_TARGET_MS), ("tokens", alone, None)):
        value, spread = median(samples)
        rows.append(
            Row(
                f"{name}, 128 KiB, warm",
                value,
                "CPU ms",
                "lower",
                target=target,
                spread=spread,
                note=f"the next turn after {TURNS} messages",
            )
        )
    return rows


def rss_mib() -> float:
    """Memory of this process."""
    return psutil.Process().memory_info().rss / (1 << 20)


def main() -> None:
    """Measure, write the report and print its table."""
    no_options(__doc__)
    if not IS_NATIVE:
        raise SystemExit("the native extension is not built; benchmarks need it")
    folder = large_model()
    fresh = Texts()
    fresh.take(1)
    before, began = rss_mib(), time.process_time()
    tokenizer = ModelTokenizer.from_folder(folder, TokenizerSpec())
    load_s, held = time.process_time() - began, rss_mib() - before
    if not tokenizer.sizes().fast:
        raise SystemExit("the fast tokenizer is not equal to the reference; see the log")
    edge, reference = Edge(tokenizer), Edge(ModelTokenizer.from_folder(folder))
    note = f"{MERGED} merged ids, tokenizer.json {vocabulary_hash(folder)}; {TURNS} messages, one for 100 B"
    for _ in range(3):
        edge.names(body(fresh.chat(128 << 10, TURNS)))
    rows = cold_rows(edge, reference, fresh, note) + warm_rows(edge, fresh)
    rows += [
        Row("load and prove", load_s, "CPU s", "lower", note="once at start; the reference is released"),
        Row("memory of a tokenizer", held, "MiB", "lower", note="after the proof"),
    ]
    print(write("tokenizing", "make bench-tokenizing", rows).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
