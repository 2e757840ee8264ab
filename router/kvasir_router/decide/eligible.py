"""Which candidates may do which part of a request: the one filter that every policy begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvasir.core.requests import Role
from kvasir.ports.routing import Candidate, RequestView


class Disaggregation(StrEnum):
    """Whether prefill and decode run apart: by rule, by cost, or not at all."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Eligible:
    """`full` may run the whole request; one of `prefill` with another one of `decode` may share it."""

    full: tuple[Candidate, ...] = ()
    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()


def eligible(
    candidates: Sequence[Candidate], disaggregation: Disaggregation, request: RequestView
) -> Eligible:
    """With several choices the request runs whole on one worker: a hand-off feeds one sequence."""
    prefill = tuple(c for c in candidates if c.role in (Role.PREFILL, Role.BOTH))
    decode = tuple(c for c in candidates if c.role in (Role.DECODE, Role.BOTH))
    if request.choices > 1 and disaggregation is not Disaggregation.NEVER:
        return Eligible(full=decode)
    if disaggregation is Disaggregation.NEVER:
        return Eligible(full=tuple(c for c in candidates if c.role is Role.BOTH))
    if disaggregation is Disaggregation.ALWAYS:
        return Eligible(prefill=prefill, decode=decode)
    return Eligible(full=decode, prefill=prefill, decode=decode)


def missing_role(candidates: Sequence[Candidate], disaggregation: Disaggregation) -> str | None:
    """What has to join before an ordinary request can run, in words; None when nothing."""
    roles = {c.role for c in candidates}
    if disaggregation is Disaggregation.NEVER:
        return None if Role.BOTH in roles else "no worker of role both"
    if not roles & {Role.DECODE, Role.BOTH}:
        return "no worker that decodes"
    if disaggregation is Disaggregation.AUTO:
        return None
    if not roles & {Role.PREFILL, Role.BOTH}:
        return "no worker that prefills"
    apart = any(
        p.target.worker_id != d.target.worker_id
        for p in candidates
        if p.role is not Role.DECODE
        for d in candidates
        if d.role is not Role.PREFILL
    )
    return None if apart else "no second worker: prefill and decode are to run apart"
