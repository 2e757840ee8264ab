"""Estimated costs on a worker without measurements: the performance model's, in the terms of decisions.

Decisions are linear in prompt tokens and in streams, so the model's step times are read at a typical chunk,
context and batch. The first measurements correct the estimates.
"""

from __future__ import annotations

from typing import NamedTuple

from kvasir.core.identity import WorkerIdentity
from kvasir.performance.coefficients import DATA_SHEET, Coefficients
from kvasir.performance.engines import engine_of
from kvasir.performance.profile import CalibratedProfile
from kvasir.performance.step import PromptChunk, StepWork
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


_CONTEXT_TOKENS = 4096
"""The typical length of a stream."""
_CHUNK_TOKENS = 2048
_STREAMS = 32
_TRANSFER_FIXED_S, _TRANSFER_BYTES_PER_S = 0.003, 1e10
"""One 100 Gbit/s RDMA port, a little below its nominal bandwidth."""
_TIER_FIXED_S: TierSeconds = (0.001, 0.002, 0.003)
_TIER_BYTES_PER_S: TierSeconds = (2e10, 3e9, 1e9)
"""PCIe 4.0 x16, an NVMe drive, and a store behind 10 Gbit/s Ethernet."""


class WorkerPriors:
    """The rates of workers before the first measurement, from the performance model: with the coefficients of
    `profile` where it was measured on their hardware with their model, else with those of data sheets."""

    def __init__(self, profile: CalibratedProfile | None = None) -> None:
        self._profile = profile

    def __call__(self, identity: WorkerIdentity) -> CostRates:
        """Return the priors for a worker."""
        measured = self._measured(identity)
        if measured is None or self._profile is None:
            return rates_of(identity)
        rates = rates_of(identity, measured)
        if not self._profile.transfer_byte_s:
            return rates
        return rates._replace(
            transfer_fixed_s=self._profile.transfer_fixed_s, transfer_byte_s=self._profile.transfer_byte_s
        )

    def source(self, identity: WorkerIdentity) -> str:
        """Return where the priors for a worker come from, for people."""
        measured = self._measured(identity)
        if measured is not None:
            return measured.source
        return "defaults" if rates_of(identity) == CostRates() else DATA_SHEET.source

    def _measured(self, identity: WorkerIdentity) -> Coefficients | None:
        return None if self._profile is None else self._profile.for_worker(identity)


def rates_of(identity: WorkerIdentity, measured: Coefficients | None = None) -> CostRates:
    """Return the priors for a worker; `CostRates()` if it does not report its model, or not its hardware, of
    which then nothing is known without `measured` coefficients."""
    hardware = identity.hardware
    engine = engine_of(identity, measured or DATA_SHEET)
    if engine is None or (measured is None and min(hardware.flops, hardware.bytes_per_s) <= 0):
        return CostRates()
    chunk = engine.step(StepWork((PromptChunk(_CHUNK_TOKENS, _CHUNK_TOKENS // 2),)))
    one, many = (engine.decode(streams, _CONTEXT_TOKENS).seconds for streams in (1, _STREAMS))
    stream_s = max(0.0, many - one) / (_STREAMS - 1)
    return CostRates(
        prefill_fixed_s=engine.coefficients.request_s + chunk.overhead_s,
        prefill_token_s=(chunk.device_s + chunk.communication_s) / _CHUNK_TOKENS,
        step_fixed_s=max(0.0, one - stream_s),
        step_stream_s=stream_s,
        transfer_fixed_s=_TRANSFER_FIXED_S,
        transfer_byte_s=1.0 / _TRANSFER_BYTES_PER_S,
        tier_fixed_s=_TIER_FIXED_S,
        tier_byte_s=_inverse(_TIER_BYTES_PER_S),
    )


def kv_token_bytes(identity: WorkerIdentity) -> float:
    """The KV of one token over all layers and shards, in bytes."""
    kv = identity.kv
    return kv.bytes_per_block * kv.tensor_parallel_size / kv.block_size


def _inverse(bandwidths: TierSeconds) -> TierSeconds:
    cpu, disk, remote = bandwidths
    return 1.0 / cpu, 1.0 / disk, 1.0 / remote
