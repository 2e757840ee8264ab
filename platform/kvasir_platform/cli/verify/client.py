"""Sends completions to the gateway that is verified, as an ordinary client would."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.core.errors import UpstreamError
from kvasir_platform.bench.client.answers import AnswerEvents, BrokenAnswerError
from kvasir_platform.bench.client.endpoint import CallResult
from kvasir_platform.cli.common.gateway_client import key_headers, reason_in
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.verify.scores import ScoredToken

_BODY_LIMIT = 64 << 20
_CHUNK = 64 << 10
_LIKELY = 2
"""Log-probabilities of each token: of the chosen one and the next."""
_BUSY = (429, 503)
_SCORED = 20
"""The most that an engine returns by default for each token of a prompt."""
_TRANSFER = re.compile(r'\btransfer;dur=([\d.]+);desc="(\d+) bytes"')


@dataclass(frozen=True, slots=True)
class VerifiedCompletion:
    """An answer: the id to ask its decision by, its token ids, for each of them log-probabilities of likely
    tokens by id, the prompt tokens that were in a cache, and the bytes and seconds of the transfer of its
    KV."""

    request_id: str
    tokens: tuple[int, ...]
    likely: tuple[dict[int, float], ...]
    cached_tokens: int
    moved_bytes: int = 0
    transfer_s: float = 0.0


class VerifyClient:
    """Asks the gateway at `site` for completions of `model`. Its methods raise UpstreamError with the reason
    if an answer is an error, or none comes within `timeout_s` seconds."""

    def __init__(
        self, site: Site, model: str, timeout_s: float, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._pause = pause
        self._site = site
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"} | key_headers()

    def tokenize(self, text: str) -> tuple[list[int], int]:
        """Return the tokens of `text`, and the most that a request of the model can have."""
        answer, _ = self._ask("/tokenize", {"model": self._model, "prompt": text})
        return list(answer["tokens"]), int(answer["max_model_len"])

    def tokens(self, text: str, special: bool) -> list[int]:
        """Return the tokens of `text`, with the model's special tokens or without."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        answer, _ = self._ask("/tokenize", body)
        return list(answer["tokens"])

    def score(self, prompt: Sequence[int], first: int) -> tuple[ScoredToken, ...]:
        """Return the log-probabilities of the tokens of `prompt` from number `first` on, which is at least
        1. A gateway that is busy is asked again, for as long as an answer may take."""
        body = self._body(prompt, 1) | {"prompt_logprobs": _SCORED}
        answer = self._ask_in_turn("/v1/completions", body)
        found = answer["choices"][0].get("prompt_logprobs") or ()
        if len(found) != len(prompt):
            raise UpstreamError(
                f"the gateway at {self._site.authority} returned log-probabilities of {len(found)} tokens "
                f"for a prompt of {len(prompt)}"
            )
        return tuple(
            ScoredToken(
                each[str(token)]["logprob"], {int(other): one["logprob"] for other, one in each.items()}
            )
            for token, each in zip(prompt[first:], found[first:], strict=True)
        )

    def complete(self, prompt: Sequence[int], max_tokens: int, *, whole: bool = False) -> VerifiedCompletion:
        """Return the greedy completion. `whole`: on one worker and without its prefix cache, which is what
        log-probabilities of the prompt require."""
        body = self._body(prompt, max_tokens) | {
            "logprobs": _LIKELY,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer, headers = self._ask("/v1/completions", body | ({"prompt_logprobs": 0} if whole else {}))
        choice, usage = answer["choices"][0], answer["usage"]
        likely = tuple(
            {int(token.removeprefix("token_id:")): value for token, value in each.items()}
            for each in (choice.get("logprobs") or {}).get("top_logprobs") or ()
        )
        moved = _TRANSFER.search(headers.get("server-timing", ""))
        return VerifiedCompletion(
            request_id=headers.get("x-request-id", ""),
            tokens=tuple(choice["token_ids"]),
            likely=likely,
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            moved_bytes=0 if moved is None else int(moved[2]),
            transfer_s=0.0 if moved is None else float(moved[1]) / 1e3,
        )

    def stream(self, prompt: Sequence[int], max_tokens: int) -> CallResult:
        """Stream a completion of exactly `max_tokens` tokens, and time its chunks."""
        result = CallResult(time.perf_counter(), output_tokens=max_tokens)
        events = AnswerEvents(result)
        with self._connected() as sent:
            response = sent.post(
                "/v1/completions", self._body(prompt, max_tokens) | {"stream": True}, self._headers
            )
            if response.status != 200:
                raise self._refused("/v1/completions", response.status, response.read(_BODY_LIMIT))
            try:
                while data := response.read1(_CHUNK):
                    events.feed(data, time.perf_counter())
            except BrokenAnswerError as error:
                raise UpstreamError(f"a stream broke off: {error.detail}") from error
        if not events.ended:
            raise UpstreamError("a stream ended without [DONE]")
        if not result.chunks:
            raise UpstreamError("a stream had no token")
        result.ended_s = time.perf_counter()
        return result

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def _ask_in_turn(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        waited = 0.0
        while True:
            try:
                return self._ask(path, body)[0]
            except _BusyError as error:
                waited += error.wait_s
                if waited > self._timeout_s:
                    raise
                self._pause(error.wait_s)

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        with self._connected() as sent:
            response = sent.post(path, body, self._headers)
            read = response.read(_BODY_LIMIT)
            if response.status in _BUSY:
                wait = response.headers.get("retry-after", "")
                refused = self._refused(path, response.status, read)
                raise _BusyError(refused.message, int(wait) if wait.isdecimal() else 1)
            if response.status != 200:
                raise self._refused(path, response.status, read)
            return json.loads(read), {name.lower(): value for name, value in response.getheaders()}

    def _connected(self) -> _Call:
        return _Call(self._site, self._timeout_s)

    def _refused(self, path: str, status: int, body: bytes) -> UpstreamError:
        return UpstreamError(
            f"the gateway at {self._site.authority} answered {status} to {path}: {reason_in(body)}"
        )


class _BusyError(UpstreamError):
    """The gateway has no room for a request now; `wait_s` is after how many seconds to ask again."""

    def __init__(self, message: str, wait_s: int) -> None:
        super().__init__(message)
        self.wait_s = max(1, wait_s)


class _Call:
    """One connection for one call, closed at the end; errors of the connection become UpstreamError."""

    def __init__(self, site: Site, timeout_s: float) -> None:
        self._site = site
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._connection is not None:
            self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise UpstreamError(
                f"the gateway at {self._site.authority} {self._site.explain(error)}"
            ) from error

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection = connection = self._site.connect(self._timeout_s)
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()
