"""What cells tell each other once a second: the capacity of each model and revision, and its price.

Reports are msgpack arrays: a field that a newer version appends is ignored by an older one, and has its
default where an older one sends none. What comes from another cell is bounded in size, in the number of
models and prefixes, and in every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvasir.core.errors import ProtocolError

INTERVAL_S = 1.0
"""Seconds between two reports of a cell."""
MAX_REPORT_BYTES = 256 << 10
MAX_MODELS = 256
MAX_PREFIXES = 32
"""Prefixes of one model in a report: a report stays at a few kilobytes."""
MAX_FEATURES = 128
MAX_LABEL = 253
_MAX_COUNT = 1 << 53
_MAX_SECONDS = 86_400.0
_MAX_RATE = 1e12

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MAX_SECONDS)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=_MAX_RATE)]


class CachedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prompt prefix of `tokens` tokens that the cell holds; `name` is the hash of its last block."""

    name: _Hash
    tokens: _Count


class ModelReport(msgspec.Struct, frozen=True, array_like=True):
    """One model at one revision in a cell.

    `ready` workers take requests. A typical request that came at the time of the report would wait for
    `queue_s` before its prompt is computed, at `prefill_tokens_per_s`, on one worker (0: not measured). KV of
    `kv_free_tokens` tokens is neither used nor reserved, on all workers together. A million tokens of prompt
    and output cost `dollars_per_mtok` (0: no price known). `prefixes` are the most used cached prefixes;
    empty where a cell does not report any. `features` are what requests may need beside the model.
    """

    model: _Name
    revision: _Label = ""
    ready: _Count = 0
    queue_s: _Seconds = 0.0
    prefill_tokens_per_s: _Rate = 0.0
    kv_free_tokens: _Count = 0
    dollars_per_mtok: _Rate = 0.0
    prefixes: Annotated[tuple[CachedPrefix, ...], msgspec.Meta(max_length=MAX_PREFIXES)] = ()
    features: Annotated[tuple[_Label, ...], msgspec.Meta(max_length=MAX_FEATURES)] = ()


class CellReport(msgspec.Struct, frozen=True, array_like=True):
    """What a cell says of itself. `epoch` grows with each start of the process that reports, and `sequence`
    with each of its reports. A cell that is `draining` takes no requests of others."""

    cell: _Name
    epoch: _Count
    sequence: _Count
    models: Annotated[tuple[ModelReport, ...], msgspec.Meta(max_length=MAX_MODELS)] = ()
    draining: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """By which a cell's reports are ordered."""
        return self.epoch, self.sequence


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(CellReport)


def encode_report(report: CellReport) -> bytes:
    """Return the report as bytes. Raise ProtocolError for one that no cell would accept."""
    data = _ENCODER.encode(report)
    decode_report(data)
    return data


def decode_report(data: bytes) -> CellReport:
    """Return the report that another cell encoded. Raise ProtocolError if it is malformed or beyond the
    bounds."""
    if len(data) > MAX_REPORT_BYTES:
        raise ProtocolError(f"a cell's report of {len(data)} bytes exceeds {MAX_REPORT_BYTES}")
    try:
        report = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a cell's report cannot be read: {error}") from error
    if not all(math.isfinite(number) for each in report.models for number in _numbers(each)):
        raise ProtocolError(f"a report of cell {report.cell} holds a number that is not finite")
    return report


def _numbers(report: ModelReport) -> Iterable[float]:
    return report.queue_s, report.prefill_tokens_per_s, report.dollars_per_mtok


def cached_tokens(report: ModelReport, block_hashes: frozenset[int]) -> int:
    """Return how many leading tokens of a prompt with these blocks the cell holds, as far as it reports. A
    block's hash includes those before it."""
    return max((each.tokens for each in report.prefixes if each.name in block_hashes), default=0)
