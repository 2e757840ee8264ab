"""A request's SLO class and session.

Both affect where a request runs and not its response, so they are headers that any client can set; fields of
the body serve as a session if no header names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvasir.config.spec.deployment import SloSpec
from kvasir.core.errors import RequestError
from kvasir.core.requests import SloClass

SLO_HEADER = "x-kvasir-slo"
SESSION_HEADER = "x-session-id"
TIMING_HEADER = "x-kvasir-server-timing"
"""Asks for the Server-Timing of a stream's end, by the value `comment`."""
MAX_HINT = 1024
"""Bytes of a session's name, in a header or a body."""


class SloClasses:
    """The SLO classes of a deployment by name; the first is the default."""

    def __init__(self, specs: Sequence[SloSpec]) -> None:
        classes = [SloClass(spec.name, spec.ttft_s, spec.itl_s) for spec in specs]
        self._default = classes[0]
        self._by_name = {slo.name.encode(): slo for slo in classes}

    def asked_for(self, headers: Mapping[bytes, bytes]) -> SloClass:
        """Return the class that the headers name. Raise RequestError listing the available ones."""
        name = headers.get(SLO_HEADER.encode())
        if name is None:
            return self._default
        slo = self._by_name.get(name.strip())
        if slo is None:
            there_are = ", ".join(each.decode() for each in self._by_name)
            shown = name[:64].decode("ascii", "replace")
            raise RequestError(
                f"There is no SLO class {shown!r} here; the classes are: {there_are}.",
                code="unknown_slo_class",
                param=SLO_HEADER,
            )
        return slo


def session_name(headers: Mapping[bytes, bytes], named: str | None) -> str:
    """Return the session of a request, "" for none: the header takes precedence over `named` from the body.
    Raise RequestError for a name that is too long."""
    header = headers.get(SESSION_HEADER.encode())
    if header is None:
        return named or ""
    if len(header) > MAX_HINT:
        raise RequestError(
            f"{SESSION_HEADER} has {len(header)} bytes; {MAX_HINT} are allowed.",
            code="invalid_value",
            param=SESSION_HEADER,
        )
    return header.decode("latin-1")
