"""The fleets of the comparison: their workers, memory, traffic, and what the router believes of them.

Memory is derived from the trace: the caches of all workers together, on devices and in CPU memory, hold the
fraction CACHED of its distinct blocks, so that they bind in a fleet of any size. A worker has as much of it
on its devices as those have, since running requests need memory there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from kvasir.core.identity import WorkerIdentity
from kvasir.ports.clock import Rng
from kvasir_platform.sim.replay.replay import EXPECTED_OUTPUT_TOKENS, Setting
from kvasir_platform.sim.replay.replica import SimReplica, a800_node, promise
from kvasir_platform.workload.distributions import normal
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import CostRates, RateBook, rates_of
from kvasir_router.decide.links import LinkRates, link_rates_of
from load_tests.scenarios.policies.traces import (
    distinct_blocks,
    longest_blocks,
    median_prompt,
    trace_of,
)

CACHED = 0.28
"""The part of a trace's distinct blocks that the caches of a fleet hold together: what four nodes with 2 TB
of CPU memory each hold of Mooncake's conversations."""
WRONG_BY = 0.3
"""Standard deviation of the logarithm of what the router's prior rates are wrong by."""
SEED = 1
PER_WORKER = 0.13
"""Speed-up per worker at which searches begin where nothing is known."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet and its trace, by default the mixed one. `apart` are the sizes of a prefill and a decode pool,
    which replace `workers` that do both. `per_worker` is the speed-up at which searches begin."""

    path: Path | None
    workers: int
    apart: tuple[int, int] = (0, 0)
    cached: float = CACHED
    swapped: bool = False
    seed: int = SEED
    requests: int | None = None
    per_worker: float = PER_WORKER

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.workers + sum(self.apart)

    @property
    def shares(self) -> bool:
        """Whether its prompts have prefixes in common."""
        return self.path is None or self.path.suffix != ".csv"

    @property
    def trace(self) -> Workload:
        """Its traffic."""
        return trace_of(self.path, self.requests, self.swapped, self.seed)


def memory_of_each(hardware: SimReplica, workers: int, blocks: float, longest: int) -> SimReplica:
    """The replica of which `workers` hold so many blocks together, on devices first; never more than the
    hardware has, nor less on devices than the `longest` request needs."""
    each = int(blocks / workers)
    device = max(min(each, hardware.device_blocks), longest)
    return replace(hardware, device_blocks=device, cpu_blocks=min(max(0, each - device), hardware.cpu_blocks))


def setting(fleet: Fleet, speed_up: float) -> Setting:
    """The fleet with its trace."""
    trace = fleet.trace
    blocks = fleet.cached * distinct_blocks(trace)
    replica = memory_of_each(a800_node(), fleet.size, blocks, longest_blocks(trace))
    prefill, decode = fleet.apart
    return Setting(
        trace,
        replica,
        promise(replica, median_prompt(trace)),
        speed_up,
        workers=fleet.workers,
        prefill_workers=prefill,
        decode_workers=decode,
        make_rates=partial(wrong_rates, fleet.seed),
    )


def wrong_rates(seed: int) -> RateBook:
    """The rates that a router begins with: production's estimates, each wrong by a factor that is the same
    for every worker, and for every router with this seed."""

    def priors(identity: WorkerIdentity) -> CostRates:
        return perturbed(rates_of(identity), Random(f"rates {seed}"))

    def links(identity: WorkerIdentity) -> LinkRates:
        return perturbed_links(link_rates_of(identity), Random(f"links {seed}"))

    return RateBook(priors, links)


def perturbed(rates: CostRates, rng: Rng, sigma: float = WRONG_BY) -> CostRates:
    """Each rate of a worker times a factor whose logarithm is normal with mean 0. Links stay."""
    cpu, disk, remote = _wrong(rates.tier_fixed_s, rng, sigma)
    cpu_byte, disk_byte, remote_byte = _wrong(rates.tier_byte_s, rng, sigma)
    prefill, token, step, stream, transfer, byte = _wrong(rates[:6], rng, sigma)
    return CostRates(
        prefill_fixed_s=prefill,
        prefill_token_s=token,
        step_fixed_s=step,
        step_stream_s=stream,
        transfer_fixed_s=transfer,
        transfer_byte_s=byte,
        tier_fixed_s=(cpu, disk, remote),
        tier_byte_s=(cpu_byte, disk_byte, remote_byte),
        links=rates.links,
    )


def perturbed_links(links: LinkRates, rng: Rng, sigma: float = WRONG_BY) -> LinkRates:
    """The same of links."""
    return LinkRates(_wrong(links.fixed_s, rng, sigma), _wrong(links.byte_s, rng, sigma))


def _wrong(numbers: Iterable[float], rng: Rng, sigma: float) -> tuple[float, ...]:
    return tuple([each * math.exp(sigma * normal(rng)) for each in numbers])


def memory_note(fleet: Fleet) -> str:
    """What the caches hold, for the notes of a report."""
    played = setting(fleet, 1.0)
    replica, known = played.replica, distinct_blocks(played.trace)
    each = replica.device_blocks + replica.cpu_blocks
    whole = a800_node()
    share = each / (whole.device_blocks + whole.cpu_blocks)
    return (
        f"the caches of all workers hold {each * fleet.size / known:.0%} of the trace's {known:,} distinct "
        f"blocks: {replica.device_blocks:,} + {replica.cpu_blocks:,} blocks of {TRACE_BLOCK_TOKENS} tokens "
        f"each (device + CPU memory), {share:.0%} of a node's"
    )


def facts(fleet: Fleet) -> str:
    """Description of the simulation."""
    played = setting(fleet, 1.0)
    trace, replica, slo = played.trace, played.replica, played.slo
    shared = trace.infinite_hits() / trace.prompt_tokens
    parts = (
        f"{len(trace.requests):,} requests, of whose prompt tokens an infinite cache hits {shared:.1%}",
        f"each worker LLaMA2-70B on {replica.hardware.devices} x {replica.hardware.device}, "
        f"{1 / replica.prefill_token_s:,.0f} prompt tokens/s before attention, a step of at most "
        f"{replica.step_tokens} tokens and {replica.step_fixed_s * 1e3:.1f} ms, more with streams",
        f"promise: TTFT {slo.ttft_s:.2f} s and mean ITL {slo.itl_s * 1e3:.0f} ms (ten and five times what a "
        "request of median length has on an idle worker), for 90 % of the requests",
        f"reports come {played.report_delay_s * 1e3:.0f} ms late",
        f"routers expect {EXPECTED_OUTPUT_TOKENS} output tokens of each request, and begin with rates "
        f"that are wrong by a log-normal factor (sigma {WRONG_BY})",
    )
    return "; ".join(parts)
