"""The endpoint through which `kvasir record` reads what a router records."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

import msgspec

from kvasir.core.errors import RequestError
from kvasir.ports.recordings import RecordingPort, RecordingQuery
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import RecordingPage, RecordingRead

RECORDINGS = "/recordings/"
MOST_BLOCK_TOKENS = 65_536
_NAME = re.compile(r"[0-9A-Za-z_.-]{1,64}")
_SALT = re.compile(r"[0-9a-f]{32,128}")

log = logging.getLogger(__name__)


class RecordingPages:
    """POST /recordings/{reader}: the next records for a reader of that name, whose first call begins its
    recording. A POST, since what was read is forgotten by the call after it."""

    def __init__(self, recordings: RecordingPort) -> None:
        self._recordings = recordings

    def read(self, exchange: Exchange) -> None:
        """Raise RequestError for an invalid body, CapacityError if there are too many readers."""
        reader = unquote(exchange.request.path[len(RECORDINGS) :])
        if _NAME.fullmatch(reader) is None:
            raise RequestError(
                "A reader's name has 1 to 64 letters, digits, dots, dashes or underscores.",
                code="invalid_value",
            )
        asked = _decoded(exchange.request.body)
        query = RecordingQuery(
            bytes.fromhex(asked.salt),
            after=asked.after,
            block_tokens=asked.block_tokens,
            names=asked.names,
            decisions=asked.decisions,
            ids=asked.ids,
            prefixes=asked.prefixes,
            closing=asked.closing,
            done=asked.done,
        )
        batch = self._recordings.read(reader, query)
        if not asked.after and not batch.records and batch.elapsed_s == 0.0:
            log.info("an operator records requests as %s", reader)
        body = RecordingPage(
            batch.opened,
            batch.elapsed_s,
            [dict(record) for record in batch.records],
            batch.last,
            batch.dropped,
            batch.running,
            batch.more,
            batch.block_tokens,
        )
        exchange.respond(200, msgspec.json.encode(body))


def _decoded(body: bytes) -> RecordingRead:
    """Raise RequestError that names the field."""
    try:
        asked = msgspec.json.decode(body, type=RecordingRead)
    except msgspec.ValidationError as error:
        raise RequestError(f"The body is invalid: {error}.", code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if _SALT.fullmatch(asked.salt) is None or len(asked.salt) % 2:
        raise RequestError(
            "salt: send 16 to 64 bytes in hexadecimal digits.", code="invalid_value", param="salt"
        )
    if not 1 <= asked.block_tokens <= MOST_BLOCK_TOKENS:
        raise RequestError(
            f"block_tokens: send 1 to {MOST_BLOCK_TOKENS}.", code="invalid_value", param="block_tokens"
        )
    if asked.after < 0:
        raise RequestError("after: send the number of a record, or 0.", code="invalid_value", param="after")
    return asked
