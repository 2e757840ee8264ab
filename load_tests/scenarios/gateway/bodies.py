"""Requests of the gateway bench: chats of source text of a given size, all different.

Each round has its own texts, and every system gets the same ones. The `warm` request of a conversation is the
next turn after its `128 KiB` request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from load_tests.scenarios.tokenizing import TURNS, Chat, Texts

MODEL = "bench"
OUTPUT_TOKENS = 2
STREAM_TOKENS = 100_000
MEAN_PROMPT, MEAN_OUTPUT = 1155, 211
"""Mean tokens of the requests of Azure's conversation trace of 2023 (Splitwise, ISCA 2024)."""
_REPLY_CHARS, _NEXT_CHARS = 1000, 200
_KEPT_TEXTS = 512


@dataclass(frozen=True, slots=True)
class Size:
    """Requests of one kind in a round: `count` of about `chars` characters, over a number of connections."""

    name: str
    chars: int
    count: int
    connections: int


SIZES = (Size("100 B", 100, 1500, 32), Size("16 KiB", 16 << 10, 256, 16), Size("128 KiB", 128 << 10, 32, 4))
WARM = Size("128 KiB, warm", 128 << 10, 32, 4)


def payload(chat: Chat, tokens: int) -> bytes:
    """A streamed chat completion of exactly that many tokens."""
    return json.dumps(
        {
            "model": MODEL,
            "messages": chat,
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()


def request(body: bytes, address: str, key: str) -> bytes:
    """The whole HTTP request, with the headers that an SDK sends."""
    host = address.rpartition("://")[2]
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n"
        f"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.0\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Round:
    """The bodies of one round, by size name."""

    def __init__(self, texts: Texts, scale: float) -> None:
        self.bodies: dict[str, list[bytes]] = {}
        warm = []
        for size in SIZES:
            made = []
            for _ in range(max(4, round(size.count * scale))):
                turns = 1 if size.chars <= 100 else TURNS
                chat = texts.chat(size.chars, turns)
                made.append(payload(chat, OUTPUT_TOKENS))
                if size.chars == WARM.chars:
                    said = {"role": "assistant", "content": texts.take(_REPLY_CHARS)}
                    warm.append(payload([*chat, said, *texts.chat(_NEXT_CHARS, 1)], OUTPUT_TOKENS))
            self.bodies[size.name] = made
        self.bodies[WARM.name] = warm


class MeanRequests:
    """Requests of the mean size of Azure's conversation trace. Texts come again after a while, each time
    behind another number, so that no prompt begins like one before."""

    def __init__(self, texts: Texts, chars: int) -> None:
        self._kept = [texts.take(chars) for _ in range(_KEPT_TEXTS)]
        self._number = 0

    def take(self) -> bytes:
        """The body of the next request."""
        self._number += 1
        text = self._kept[self._number % len(self._kept)]
        return payload([{"role": "user", "content": f"{self._number:08d} {text}"}], MEAN_OUTPUT)


def short_chat(number: int) -> Chat:
    """A prompt of about 100 bytes."""
    return [
        {"role": "user", "content": f"{number:08d} " + "What does the scheduler do when it is full? " * 2}
    ]
