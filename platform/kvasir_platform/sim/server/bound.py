"""The fluid upper bound: requests per second that the fleet could serve with perfect routing.

Every block that an unbounded shared cache would hit is hit, and work is divided evenly and without rest. Of
one engine, the time of a step is at least

    max(operations / reached FLOP/s, bytes / reached bandwidth) + exchanges between devices + fixed costs

so the engine time of a request is at least w = max(A, M) + C, where A is the sum of the operations of its
uncached prompt and its output tokens, M that of the KV they read and of the weights' share, and C that of
exchanges and fixed costs. Weights and fixed costs of a step are shared by the most streams that memory, seats
and the promised time per token allow, or by a whole budget of prompt tokens. N replicas serve at most N / w
requests per second; with pools of one role, each pool bounds its part of the request, and the least counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.requests import Role
from kvasir.performance.step import PromptChunk, StepTime, StepWork
from kvasir_platform.sim.server.setting import ServerSetting, SimulatedPool


@dataclass(frozen=True, slots=True)
class FluidBound:
    """Requests per second, by pool and of all; and the figures behind them: mean prompt tokens to compute and
    in total, mean output tokens, and the most streams of a replica of each pool."""

    requests_per_s: float
    by_pool: dict[str, float]
    computed_tokens: float
    prompt_tokens: float
    output_tokens: float
    streams: dict[str, int]


def fluid_bound(setting: ServerSetting) -> FluidBound:
    """Return the bound of a fleet on a workload."""
    requests = setting.workload.requests
    count = max(1, len(requests))
    prompt = setting.workload.prompt_tokens / count
    output = setting.workload.output_tokens / count
    computed = prompt - setting.workload.infinite_hits() / count
    by_pool: dict[str, float] = {}
    streams: dict[str, int] = {}
    for pool in setting.pools:
        most = streams[pool.name] = _most_streams(pool, setting, prompt + output / 2)
        prefills = pool.role is not Role.DECODE
        decodes = pool.role is not Role.PREFILL
        parts = [_prompt_part(pool, prompt, computed)] if prefills else []
        parts += [_output_part(pool, most, prompt + output / 2, output)] if decodes else []
        seconds = max(sum(a for a, _, _ in parts), sum(m for _, m, _ in parts)) + sum(c for _, _, c in parts)
        by_pool[pool.name] = pool.replicas / seconds if seconds > 0.0 else float("inf")
    whole = sum(by_pool[pool.name] for pool in setting.pools if pool.role is Role.BOTH)
    apart = [
        sum(by_pool[pool.name] for pool in setting.pools if pool.role is role)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    return FluidBound(whole + min(apart), by_pool, computed, prompt, output, streams)


def _most_streams(pool: SimulatedPool, setting: ServerSetting, context: float) -> int:
    """Return the most streams that seats, memory and the promised time per token allow, at least one."""
    replica = pool.replica
    memory = replica.memory
    shared = max(1.0, context - setting.workload.infinite_hits() / max(1, len(setting.workload.requests)))
    room = int(memory.blocks * memory.block_tokens / shared)
    low, high = 1, max(1, min(replica.options.most, room))
    rate, lookahead = replica.options.tokens_per_step, replica.options.lookahead
    while low < high:
        middle = (low + high + 1) // 2
        seconds = replica.model.decode(middle, context, lookahead=lookahead).seconds / rate
        low, high = (middle, high) if seconds <= setting.slo.itl_s else (low, middle - 1)
    return low


def _prompt_part(pool: SimulatedPool, prompt: float, computed: float) -> tuple[float, float, float]:
    """Return the seconds of operations, of memory, and of all else that a prompt takes at least."""
    budget = pool.replica.options.step_tokens
    tokens = max(1, round(computed))
    alone = pool.replica.model.step(StepWork((PromptChunk(tokens, round(max(0.0, prompt - computed))),)))
    share = min(1.0, tokens / budget)
    return alone.compute_s, alone.memory_s * share, _rest(alone) * share


def _output_part(
    pool: SimulatedPool, streams: int, context: float, output: float
) -> tuple[float, float, float]:
    """Return the seconds of operations, of memory, and of all else that an output takes at least."""
    options = pool.replica.options
    step = pool.replica.model.decode(streams, context, lookahead=options.lookahead)
    steps = output / (streams * options.tokens_per_step)
    return step.compute_s * steps, step.memory_s * steps, _rest(step) * steps


def _rest(step: StepTime) -> float:
    return step.communication_s + step.overhead_s
