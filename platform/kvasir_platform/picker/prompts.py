"""What a decision needs of an HTTP request to a model server: its model, prompt, output and session.

Model servers do not report their blocks to a picker, so the index predicts them, and only equal prefixes
matter: four bytes of the request's prompt stand for a token. No tokenizer is needed, and any model can be
served.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvasir.core.errors import RequestError
from kvasir.core.requests import Request, Sampling

BYTES_PER_TOKEN: Final = 4
_MAX_TOKENS: Final = 1 << 20
"""Prompt tokens that are compared; the rest of a longer prompt counts for nothing."""
_MAX_NAME: Final = 1024
SESSION_HEADER: Final = "x-session-id"


class _Asked(msgspec.Struct):
    """The fields that matter, of any of OpenAI's or Anthropic's bodies. Others are ignored: the model server
    judges them."""

    model: str = ""
    prompt: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class PickedFor:
    """A request as the decision sees it. `model` is what the client sent, "" for none."""

    model: str
    prompt: bytes
    max_tokens: int | None = None
    salt: str = ""
    session: str = ""

    def request(self, request_id: str, pool: str, now: float) -> Request:
        """Return the router's form. Prompts of two models or salts share no block."""
        whole = self.prompt[: BYTES_PER_TOKEN * _MAX_TOKENS]
        tokens = array(
            "I", whole[: len(whole) // BYTES_PER_TOKEN * BYTES_PER_TOKEN] or bytes(BYTES_PER_TOKEN)
        )
        return Request(
            request_id,
            pool,
            tokens,
            Sampling(max_tokens=self.max_tokens),
            salt=f"{self.model}\n{self.salt}",
            session=self.session,
            arrival_s=now,
        )


def picked_for(headers: Mapping[str, str], body: bytes) -> PickedFor:
    """Return what the decision needs of a request. Raise RequestError for a body that is not a JSON object
    with these fields; a request without a body has no prompt."""
    session = headers.get(SESSION_HEADER, "")[:_MAX_NAME]
    if not body.strip():
        return PickedFor("", b"", session=session)
    try:
        asked = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"The body is no request of an inference API: {error}", code="invalid_json"
        ) from None
    # What templates put first comes first, so that a common beginning is found.
    parts = (asked.tools, asked.system, asked.instructions, asked.messages, asked.prompt, asked.input)
    limits = (asked.max_completion_tokens, asked.max_output_tokens, asked.max_tokens)
    named = session or asked.session_id or asked.prompt_cache_key or asked.user or ""
    return PickedFor(
        asked.model[:_MAX_NAME],
        b"".join(map(bytes, parts)),
        next((max(1, limit) for limit in limits if limit is not None), None),
        (asked.cache_salt or "")[:_MAX_NAME],
        named[:_MAX_NAME],
    )


_DECODER: Any = msgspec.json.Decoder(_Asked)
