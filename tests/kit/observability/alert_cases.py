"""Series under which each alert of the chart fires, and series under which it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Values = Mapping[str, str]
"""The values of each series, one a minute, as promtool writes them."""

MINUTE = 60
"""When alerts are looked at, if a case does not say otherwise."""
COLD_MINUTE = 595
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class AlertCase:
    """The alert fires with these labels under `fires`, and not under `fires` changed by one of `quiet`."""

    alert: str
    labels: Mapping[str, str]
    fires: Values
    quiet: tuple[Values, ...]
    minute: int = MINUTE


def always(value: float) -> str:
    """A gauge that has this value all the time."""
    return f"{value:g}x{MINUTE}"


def grows(per_minute: float) -> str:
    """A counter that grows evenly."""
    return f"0+{per_minute:g}x{MINUTE}"


def late(value: float = 1) -> str:
    """A counter that is 0 until a few minutes before alerts are looked at."""
    return f"0x{MINUTE - 10} {value:g}x10"


def appears(value: float = 1) -> str:
    """A counter of which nothing is known until a few minutes before alerts are looked at."""
    return f"_x{MINUTE - 10} {value:g}x10"


def requests(met: float, missed: float, model: str = "m") -> dict[str, str]:
    """Requests a minute that met and that missed their class."""
    return {
        f'kvasir_slo_requests_total{{model="{model}",slo="chat",met="{each}"}}': grows(count)
        for each, count in (("yes", met), ("no", missed))
    }


def missed(promise: str, cause: str, per_minute: float, model: str = "m") -> dict[str, str]:
    """Requests a minute that missed a promise for a cause."""
    labels = f'model="{model}",slo="chat",promise="{promise}",cause="{cause}"'
    return {f"kvasir_slo_missed_requests_total{{{labels}}}": grows(per_minute)}


def spread(metric: str, values: Mapping[str, float], model: str = "m") -> dict[str, str]:
    """A histogram whose buckets grow so much a minute, up to each bound; the last is of all."""
    found = {f'{metric}_bucket{{model="{model}",le="{le}"}}': grows(count) for le, count in values.items()}
    return found | {f'{metric}_count{{model="{model}"}}': grows(values["+Inf"])}


def cached(fell: bool, model: str = "m") -> dict[str, str]:
    """A prefix cache that had most of all prompts, and hardly any of those of the last hour if it fell."""
    had = 540 * 800
    then = f"{had}+50x59" if fell else f"{had}+800x59"
    return {
        f'kvasir_cached_tokens_total{{model="{model}"}}': f"0+800x539 {then}",
        f'kvasir_prompt_tokens_total{{model="{model}"}}': "0+1000x600",
    }


def for_long(series: Values) -> dict[str, str]:
    """The same counters until `COLD_MINUTE`."""
    return {name: values.replace(f"x{MINUTE}", "x600") for name, values in series.items()}


ITL = "kvasir_inter_token_latency_seconds"
TTFT = "kvasir_time_to_first_token_seconds"
EVEN = {"0.01": 0, "0.25": 1000, "1": 1000, "+Inf": 1000}
UNEVEN = {"0.01": 900, "0.25": 900, "1": 1000, "+Inf": 1000}
_RARE = {"0.01": 0.9, "0.25": 0.9, "1": 1.0, "+Inf": 1.0}
_MODEL = {"model": "m"}
_PROMISED = {"model": "m", "slo": "chat"}


def _gauge(alert: str, series: str, high: float, low: float, **labels: str) -> AlertCase:
    matchers = ",".join(f'{key}="{value}"' for key, value in labels.items())
    name = f"{series}{{{matchers}}}"
    kept = {key: value for key, value in labels.items() if key != "instance"}
    return AlertCase(alert, kept, {name: always(high)}, ({name: always(low)},))


def _cause(alert: str, promise: str, cause: str, other: str) -> AlertCase:
    """One of ten requests misses a promise for this cause; quiet: most of them for another one."""
    fires = requests(90, 10) | missed(promise, cause, 10)
    return AlertCase(
        alert, _PROMISED, fires, (missed(promise, cause, 1) | missed(promise, other, 9), requests(990, 10))
    )


_USED, _WAITING = "kvasir_worker_kv_usage_ratio", 'kvasir_worker_waiting{worker="d-0",pool="d"}'
_FULL, _OTHER = f'{_USED}{{worker="d-0",pool="d"}}', f'{_USED}{{worker="d-1",pool="d"}}'
_FAILED = 'kvasir_worker_transfers_failed_total{worker="d-0"}'
_RECEIVED = 'kvasir_worker_transfers_received_total{worker="d-0"}'
_HELD = "kvasir_tenant_requests_in_flight"
_OK, _REFUSED, _BUG = (
    f'kvasir_requests_total{{model="m",outcome="{each}"}}' for each in ("ok", "queue_full", "internal_error")
)
_LEFT = 'kvasir_requests_total{model="m",outcome="client_closed"}'
_LARGER = {'kvasir_requests_total{model="larger",outcome="ok"}': grows(10_000)}
_VIEWERS = 'kvasir_requests_total{model="other",outcome="no_capacity"}'
_EXPIRY = "kvasir_gateway_certificate_expiry_timestamp_seconds"
_FILTER = 'kvasir_output_filter_acts_total{filter="f",act='
_SHARED = "kvasir_rate_limits_shared"


def _expires_in(days: float) -> str:
    # Time begins with zero for promtool.
    return f"{60 * MINUTE + days * _DAY_S:.0f}x{MINUTE}"


CASES = (
    _gauge("KvasirBrownOut", "kvasir_brownout_level", 1, 0, model="m"),
    _gauge("KvasirUnderPressure", "kvasir_admission_pressure", 0.3, 0.2, model="m"),
    _gauge("KvasirNoWorkers", "kvasir_admission_parked", 1, 0, model="m"),
    _gauge("KvasirDiscoveryStale", "kvasir_discovery_stale_seconds", 90, 30, instance="a"),
    AlertCase(
        "KvasirRefusing",
        _MODEL,
        {_OK: grows(100), _REFUSED: grows(5)} | _LARGER,
        (
            {_REFUSED: grows(0.5)},
            {_REFUSED: grows(0), _LEFT: grows(5)},
            {_REFUSED: grows(0), _VIEWERS: grows(5)},
        ),
    ),
    AlertCase(
        "KvasirInternalErrors", _MODEL, {_BUG: late()} | _LARGER, ({_BUG: always(1), _LEFT: grows(5)},)
    ),
    AlertCase("KvasirSloMissed", _PROMISED, requests(90, 10), (requests(97, 3),)),
    AlertCase(
        "KvasirLimitsNotShared",
        {},
        {f'{_SHARED}{{instance="a"}}': always(0), f'{_SHARED}{{instance="b"}}': always(1)},
        ({f'{_SHARED}{{instance="a"}}': always(1)},),
    ),
    AlertCase(
        "KvasirFiltersFail",
        {"filter": "f"},
        {f'{_FILTER}"failed_open"}}': grows(1)},
        ({f'{_FILTER}"failed_open"}}': always(9), f'{_FILTER}"redacted"}}': grows(5)},),
    ),
    AlertCase("KvasirCertificateExpires", {}, {_EXPIRY: _expires_in(10)}, ({_EXPIRY: _expires_in(20)},)),
    _gauge("KvasirPoolInPanic", "kvasir_pool_panic", 1, 0, pool="d"),
    _gauge("KvasirTierDown", "kvasir_worker_tier_up", 0, 1, worker="d-0", tier="disk"),
    AlertCase(
        "KvasirTierCorrupts",
        {"tier": "disk"},
        {'kvasir_worker_tier_corrupt_blocks_total{worker="d-0",tier="disk"}': late()},
        ({'kvasir_worker_tier_corrupt_blocks_total{worker="d-0",tier="disk"}': always(7)},),
    ),
    _cause("KvasirTtftQueue", "ttft", "queue", "prefill"),
    _cause("KvasirTtftPrefill", "ttft", "prefill", "queue"),
    AlertCase(
        "KvasirTtftColdCache",
        _PROMISED,
        for_long(requests(90, 10) | missed("ttft", "prefill", 10)) | cached(fell=True),
        (cached(fell=False), for_long(requests(990, 10))),
        COLD_MINUTE,
    ),
    _cause("KvasirTtftTransfer", "ttft", "transfer", "prefill"),
    _cause("KvasirTtftTier", "ttft", "tier", "prefill"),
    _cause("KvasirTtftDecode", "ttft", "decode", "prefill"),
    AlertCase(
        "KvasirTtftP99",
        _PROMISED,
        requests(98, 2) | missed("ttft", "queue", 1) | missed("ttft", "decode", 1),
        (
            requests(998, 2),
            missed("ttft", "queue", 0) | missed("ttft", "decode", 0) | missed("itl", "decode", 2),
        ),
    ),
    AlertCase(
        "KvasirItlBatch",
        _PROMISED,
        requests(90, 10) | missed("itl", "decode", 10) | spread(ITL, EVEN),
        (requests(990, 10), spread(ITL, UNEVEN)),
    ),
    AlertCase(
        "KvasirItlStall",
        _PROMISED,
        requests(90, 10) | missed("itl", "decode", 10) | spread(ITL, UNEVEN),
        (requests(990, 10), spread(ITL, EVEN)),
    ),
    _cause("KvasirItlTransfer", "itl", "moved", "decode"),
    AlertCase(
        "KvasirRequestsFail",
        _PROMISED,
        requests(90, 10) | missed("success", "failed", 10),
        (requests(990, 10), missed("success", "failed", 0) | missed("ttft", "queue", 10)),
    ),
    AlertCase(
        "KvasirTtftUneven",
        _MODEL,
        spread(TTFT, UNEVEN),
        (spread(TTFT, EVEN), spread(TTFT, _RARE)),
    ),
    AlertCase(
        "KvasirItlUneven",
        _MODEL,
        spread(ITL, UNEVEN),
        (spread(ITL, EVEN), spread(ITL, _RARE)),
    ),
    AlertCase("KvasirHitRateFell", _MODEL, cached(fell=True), (cached(fell=False),), COLD_MINUTE),
    AlertCase(
        "KvasirKvFragmented",
        {"pool": "d"},
        {_FULL: always(0.97), _OTHER: always(0.2), _WAITING: always(2)},
        ({_WAITING: always(0)}, {_FULL: always(0.9)}, {_OTHER: always(0.97)}),
    ),
    AlertCase(
        "KvasirKvFull",
        {"pool": "d"},
        {_FULL: always(0.97), _OTHER: always(0.97), _WAITING: always(2)},
        ({_WAITING: always(0)}, {_OTHER: always(0.2)}),
    ),
    AlertCase(
        "KvasirKvPinned",
        {"pool": "p"},
        {
            'kvasir_worker_kv_blocks_leased{worker="p-0",pool="p"}': always(40),
            'kvasir_worker_kv_blocks_capacity{worker="p-0",pool="p"}': always(100),
        },
        ({'kvasir_worker_kv_blocks_leased{worker="p-0",pool="p"}': always(20)},),
    ),
    _gauge("KvasirWorkerUnhealthy", "kvasir_worker_health", 1, 0, worker="d-0", pool="d", state="ejected"),
    _gauge("KvasirWorkersDisconnected", "kvasir_workers", 1, 0, pool="d", state="refused"),
    AlertCase(
        "KvasirIndexStale",
        {"worker": "d-0", "pool": "d"},
        {'kvasir_worker_kv_state{worker="d-0",pool="d",state="catching_up"}': always(1)},
        (
            {
                'kvasir_worker_kv_state{worker="d-0",pool="d",state="catching_up"}': always(0),
                'kvasir_worker_kv_state{worker="d-0",pool="d",state="exact"}': always(1),
            },
        ),
    ),
    AlertCase(
        "KvasirRoleLost",
        _MODEL,
        {'kvasir_cross_role_requests_total{model="m"}': grows(10), _OK: grows(100)},
        ({'kvasir_cross_role_requests_total{model="m"}': grows(1)},),
    ),
    AlertCase(
        "KvasirTransfersFail",
        {"worker": "d-0"},
        {_FAILED: grows(2), _RECEIVED: grows(10)},
        ({_RECEIVED: grows(100)}, {_FAILED: grows(0.1), _RECEIVED: grows(1)}),
    ),
    _gauge("KvasirTierTrouble", "kvasir_worker_tier_trouble", 1, 0, worker="d-0", tier="disk"),
    AlertCase(
        "KvasirTenantGreedy",
        {"tenant": "a"},
        {
            f'{_HELD}{{tenant="a"}}': always(90),
            f'{_HELD}{{tenant="b"}}': always(5),
            'kvasir_admission_queued{model="m"}': always(3),
        },
        (
            {f'{_HELD}{{tenant="b"}}': always(60)},
            {f'{_HELD}{{tenant="b"}}': f"_x{MINUTE}"},
            {'kvasir_admission_queued{model="m"}': always(0)},
        ),
    ),
    _gauge("KvasirPlannerInactive", "kvasir_planner_inactive_seconds", 90, 30, instance="a"),
    AlertCase("KvasirCertificateExpired", {}, {_EXPIRY: _expires_in(0.5)}, ({_EXPIRY: _expires_in(3)},)),
)
