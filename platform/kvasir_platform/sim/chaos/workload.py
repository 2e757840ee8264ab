"""The requests that clients send to a cluster under faults, and their only correct answers.

All kinds of sampling occur, with and without the possibility of a continuation; prompts share prefixes, and
some clients disconnect or have short deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import FinishReason, Request, Sampling
from kvasir.ports.clock import Rng
from kvasir_platform.sim.chaos.schedule import Schedule
from kvasir_workers.engines.sim.model import Context, SimModel
from kvasir_workers.engines.sim.output import SimOutput

_VOCABULARY = 4000


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request: when it is sent, through which router, and when its client disconnects, if it does."""

    at_s: float
    tokens: tuple[int, ...]
    sampling: Sampling
    router: int
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """One choice as the model generates it."""

    tokens: tuple[int, ...]
    text: str
    finish: FinishReason | None


def draw_asks(schedule: Schedule) -> list[ClientRequest]:
    """The workload of a schedule, ordered by time. Most requests arrive shortly before a fault."""
    rng = Random(f"{schedule.seed}/workload")  # noqa: S311 - a workload has to repeat
    families = [_tokens(rng, 160) for _ in range(3)]
    times = sorted(_draw_time(rng, schedule) for _ in range(schedule.requests))
    return [_draw_ask(rng, at_s, families) for at_s in times]


def _draw_time(rng: Rng, schedule: Schedule) -> float:
    if not schedule.faults or rng.random() < 0.4:
        return rng.random() * schedule.seconds
    fault = schedule.faults[rng.randrange(len(schedule.faults))]
    return max(0.0, fault.at_s - 2.0 * rng.random())


def _draw_ask(rng: Rng, at_s: float, families: list[tuple[int, ...]]) -> ClientRequest:
    shared = families[rng.randrange(len(families))][: rng.randrange(160)]
    return ClientRequest(
        at_s=at_s,
        tokens=shared + _tokens(rng, 1 + rng.randrange(60)),
        sampling=_draw_sampling(rng),
        router=rng.randrange(2),
        leaves_after_s=2.0 * rng.random() if rng.random() < 0.06 else None,
    )


def _draw_sampling(rng: Rng) -> Sampling:
    length = 4 + rng.randrange(60)
    kinds = (
        Sampling(max_tokens=length, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2),
        Sampling(max_tokens=length, temperature=0.0, min_tokens=4, stop=(_stop(rng), _stop(rng))),
        Sampling(max_tokens=length, temperature=0.9, ignore_eos=True),
        Sampling(max_tokens=length, temperature=0.9, ignore_eos=True, seed=rng.randrange(1000)),
        Sampling(max_tokens=length, temperature=0.0, ignore_eos=True, frequency_penalty=0.5),
        Sampling(max_tokens=length, temperature=0.8, ignore_eos=True, presence_penalty=0.2),
        Sampling(max_tokens=length // 2 + 1, temperature=0.7, ignore_eos=True, seed=rng.randrange(1000), n=2),
    )
    # Half of them are greedy.
    return kinds[max(0, rng.randrange(2 * len(kinds)) - len(kinds))]


def _stop(rng: Rng) -> str:
    """Text that a few outputs contain."""
    return SimModel().text(rng.randrange(_VOCABULARY))[:3]


def _tokens(rng: Rng, count: int) -> tuple[int, ...]:
    return tuple(100 + rng.randrange(_VOCABULARY - 100) for _ in range(count))


def expected(deployment: Deployment, request: Request, pool: str) -> list[ModelOutput]:
    """The answer of the simulated model of `pool` to a request, choice by choice."""
    model, engine = SimModel(), deployment.pool(pool).engine
    room = deployment.model.context_length - len(request.tokens)
    limit = min(room, request.sampling.max_tokens or room)
    answers = []
    for index in range(request.sampling.n):
        context = Context(engine.seed, request.adapter, request.sampling, index)
        context.extend(request.tokens)
        output = SimOutput(model, request.sampling, limit)
        tokens: list[int] = []
        text, finish = "", None
        while finish is None:
            emitted = output.grow(context)
            context.append(emitted.token)
            tokens.append(emitted.token)
            text, finish = text + emitted.text, emitted.finish
        answers.append(ModelOutput(tuple(tokens), text, finish))
    return answers
