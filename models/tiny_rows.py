"""Rows of tokens that teach `kvasir-tiny` to copy, and to use tools.

Why this exists: a call of a tool is mostly copied, its name and keys from the tools, its values
from the user. Prose repeats little, so a model of books does not learn to copy; rows of random
tokens that come again do teach it, since nothing but copying predicts them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tiny_chat import FIRST_WORD, ChatMaker
from tiny_practice import ToolMaker
from tiny_vocabulary import BOS, EOS, PAD, SIZE
from transformers import PreTrainedTokenizerFast


@dataclass
class Rows:
    """Tokens, what is learned of them (-100: nothing), and the text that each token belongs to.

    All three have the shape (rows, tokens). Texts do not see each other."""

    ids: torch.Tensor
    labels: torch.Tensor
    texts: torch.Tensor

    @classmethod
    def empty(cls, batch: int, size: int) -> Rows:
        shape = (batch, size)
        return cls(torch.full(shape, PAD), torch.full(shape, -100), torch.zeros(shape, dtype=torch.long))

    @classmethod
    def whole(cls, ids: torch.Tensor) -> Rows:
        """Rows of one text each, learned from end to end."""
        return cls(ids, ids, torch.zeros_like(ids))

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.texts for part in parts]),
        )

    def mask(self) -> torch.Tensor:
        """What each token may look at, of shape (rows, 1, tokens - 1, tokens - 1): its own text so far."""
        texts = self.texts[:, :-1]
        same = texts[:, None, :, None] == texts[:, None, None, :]
        return same & torch.ones(texts.shape[1], texts.shape[1], dtype=torch.bool).tril()


def copied(rng: random.Random, stream: torch.Tensor, size: int) -> tuple[list[int], list[int]]:
    """A row in which spans come again, in the same order or another; only what comes again is learned."""
    ids, labels = [BOS], [-100]

    def span(length: int) -> list[int]:
        if rng.random() < 0.7:
            return rng.choices(range(FIRST_WORD, SIZE), k=length)
        start = rng.randrange(len(stream) - length)
        return [token for token in stream[start : start + length].tolist() if token > EOS] or [FIRST_WORD]

    while len(ids) < size:
        if rng.random() < 0.6:
            first = span(rng.randint(4, 48))
            again = [first] * rng.randint(1, 3)
        else:
            spans = [span(rng.randint(3, 12)) for _ in range(rng.randint(2, 6))]
            first = [token for each in spans for token in each]
            again = rng.sample(spans, len(spans))
        ids += first
        labels += [-100] * len(first)
        for part in again:
            ids += part
            labels += [-100, *part[1:]]
    return ids[:size], labels[:size]


def copy_rows(rng: random.Random, stream: torch.Tensor, batch: int, size: int) -> Rows:
    """Rows of `copied`."""
    made = [copied(rng, stream, size) for _ in range(batch)]
    ids, labels = (torch.tensor(part) for part in zip(*made, strict=True))
    return Rows(ids, labels, torch.zeros_like(ids))


def chat_rows(tok: PreTrainedTokenizerFast, maker: ChatMaker, batch: int, size: int) -> Rows:
    """Rows of packed conversations; only the assistant's words and <|end|> are learned."""
    rows = Rows.empty(batch, size)
    for row in range(batch):
        at = 0
        while at < size:
            for text, learn in maker.conversation():
                part = torch.tensor(tok.encode(text, add_special_tokens=False))[: size - at]
                rows.ids[row, at : at + len(part)] = part
                if learn:
                    rows.labels[row, at : at + len(part)] = part
                at += len(part)
    return rows


def tool_rows(maker: ToolMaker, tok: PreTrainedTokenizerFast, batch: int, size: int) -> Rows:
    """Rows of chats with tools, each chat whole; short lists of words fill what is left."""
    rows = Rows.empty(batch, size)
    for row in range(batch):
        at = number = 0
        while size - at > 64:
            for attempt in range(6):
                chat = maker.conversation() if attempt < 4 else maker.list_chat().pieces
                pieces = [(tok.encode(text, add_special_tokens=False), learn) for text, learn in chat]
                if at + sum(len(part) for part, _ in pieces) <= size:
                    break
            for part, learn in pieces:
                here = torch.tensor(part[: size - at], dtype=torch.long)
                rows.ids[row, at : at + len(here)] = here
                if learn:
                    rows.labels[row, at : at + len(here)] = here
                at += len(here)
            number += 1
            rows.texts[row, at:] = number
    return rows
