"""Estimated costs on a worker without measurements, from its hardware.

Prefill is compute-bound: two operations per parameter and token, and attention's share, over the part of the
peak that engines reach. A decode step is memory-bound: it reads all weights once, and the KV of every stream
(Pope et al., Efficiently Scaling Transformer Inference, 2022, section 2). The first measurements correct the
estimates, so only the order of magnitude matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.core.identity import WorkerIdentity
from kvasir_router.decide.links import DEFAULT_LINKS, LinkRates

TierSeconds = tuple[float, float, float]


class CostRates(NamedTuple):
    """Costs of work on one worker in seconds, with the fields of kvasir.ports.routing.RateColumns, and of
    transfers to it over each known class of link. The defaults are those of a small model on a CPU, for
    workers that do not report their hardware."""

    prefill_fixed_s: float = 0.005
    prefill_token_s: float = 1 / 20_000
    step_fixed_s: float = 0.005
    step_stream_s: float = 0.0003
    transfer_fixed_s: float = 0.003
    transfer_byte_s: float = 1 / 2e9
    tier_fixed_s: TierSeconds = (0.001, 0.002, 0.003)
    tier_byte_s: TierSeconds = (1 / 4e9, 1 / 1e9, 1 / 5e8)
    links: LinkRates = DEFAULT_LINKS


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the nominal performance that are reached, and the paths that data sheets leave out.

    Large prefills reach about half of the peak (Pope et al. report 0.4 to 0.76), decode steps about 0.6 of
    the bandwidth (Databricks, LLM Inference Performance Engineering, 2023). `context_tokens` is the typical
    length of a stream. `step_overhead_s` is the launch time of a step. Transfer is one 100 Gbit/s RDMA port;
    the tiers are PCIe 4.0 x16, an NVMe drive and a store behind 10 Gbit/s Ethernet, each a little below its
    nominal bandwidth (bytes per second).
    """

    arithmetic: float = 0.5
    bandwidth: float = 0.6
    context_tokens: int = 4096
    step_overhead_s: float = 0.002
    prefill_overhead_s: float = 0.005
    transfer_fixed_s: float = 0.003
    transfer_bytes_per_s: float = 1e10
    tier_fixed_s: TierSeconds = (0.001, 0.002, 0.003)
    tier_bytes_per_s: TierSeconds = (2e10, 3e9, 1e9)


def rates_of(identity: WorkerIdentity, efficiency: Efficiency | None = None) -> CostRates:
    """Return the priors for a worker; `CostRates()` if it does not report its hardware or its model."""
    hardware, parameters = identity.hardware, identity.model_parameters
    known = (hardware.flops, hardware.bytes_per_s, parameters, identity.model_bytes, identity.kv.layers)
    if min(known) <= 0:
        return CostRates()
    reached = efficiency or Efficiency()
    devices = max(1, hardware.devices)
    flops = devices * hardware.flops * reached.arithmetic
    bytes_per_s = devices * hardware.bytes_per_s * reached.bandwidth
    dense = 2.0 * parameters
    layers = identity.kv.layers
    # A transformer layer has about 12 h^2 parameters; a token attends to half of the prompt on average.
    hidden = math.sqrt(parameters / (12.0 * layers))
    attention = 2.0 * layers * hidden * reached.context_tokens
    context_bytes = reached.context_tokens * kv_token_bytes(identity)
    return CostRates(
        prefill_fixed_s=reached.prefill_overhead_s,
        prefill_token_s=(dense + attention) / flops,
        step_fixed_s=reached.step_overhead_s + identity.model_bytes / bytes_per_s,
        step_stream_s=context_bytes / bytes_per_s + dense / flops,
        transfer_fixed_s=reached.transfer_fixed_s,
        transfer_byte_s=1.0 / reached.transfer_bytes_per_s,
        tier_fixed_s=reached.tier_fixed_s,
        tier_byte_s=_inverse(reached.tier_bytes_per_s),
    )


def kv_token_bytes(identity: WorkerIdentity) -> float:
    """The KV of one token over all layers and shards, in bytes."""
    kv = identity.kv
    return kv.bytes_per_block * kv.tensor_parallel_size / kv.block_size


def _inverse(bandwidths: TierSeconds) -> TierSeconds:
    cpu, disk, remote = bandwidths
    return 1.0 / cpu, 1.0 / disk, 1.0 / remote
