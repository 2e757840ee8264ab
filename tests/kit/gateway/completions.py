"""Completions of every origin in one form: whole from the gateway, streamed, and from vLLM itself; and parts
of a stream that OpenAI's client does not expose."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def put_together(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream: text, ids, finish reason, and logprobs."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            so_far = made.setdefault(
                choice.index, {"text": "", "token_ids": [], "finish": None, "stop": None, "logprobs": []}
            )
            so_far["text"] += choice.text
            so_far["token_ids"] += getattr(choice, "token_ids", None) or []
            so_far["finish"] = choice.finish_reason or so_far["finish"]
            so_far["stop"] = getattr(choice, "stop_reason", so_far["stop"])
            if choice.logprobs is not None:
                so_far["logprobs"] += choice.logprobs.token_logprobs
    return [made[index] for index in sorted(made)]


def whole(answer: Any) -> list[dict[str, Any]]:
    """The same of an answer that was not streamed."""
    return [
        {
            "text": choice.text,
            "token_ids": getattr(choice, "token_ids", None) or [],
            "finish": choice.finish_reason,
            "stop": getattr(choice, "stop_reason", None),
            "logprobs": [] if choice.logprobs is None else choice.logprobs.token_logprobs,
        }
        for choice in answer.choices
    ]


def of_vllm(done: Any) -> list[dict[str, Any]]:
    """The same of vLLM's output, without logprobs."""
    return [
        {
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish": output.finish_reason,
            "stop": output.stop_reason,
            "logprobs": [],
        }
        for output in done.outputs
    ]


def sent_before_the_end(address: str, body: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
    """The events of a stream whose client half-closes after `chunks` of them and reads on to the end."""
    with _asked(address, "/v1/completions", body, "") as sock:
        received = b""
        while received.count(b"data: ") < chunks:
            received += sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        received += _rest(sock)
    return [json.loads(event) for event in re.findall(rb"data: (\{.*\})\n", received)]


def trailers(address: str, path: str, body: dict[str, Any]) -> str:
    """The trailers after a stream's last event, for a client that accepts them."""
    with _asked(address, path, body, "TE: trailers\r\nConnection: close\r\n") as sock:
        return _rest(sock).rpartition(b"\r\n0\r\n")[2].decode()


@contextmanager
def _asked(address: str, path: str, body: dict[str, Any], headers: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{headers}"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        yield sock


def _rest(sock: socket.socket) -> bytes:
    received = b""
    while more := sock.recv(65536):
        received += more
    return received
