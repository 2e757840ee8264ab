"""The tables of the suite name what the scenarios measure: a row that a scenario gains is declared."""

from __future__ import annotations

from load_tests.scenarios.agreement.__main__ import LOADS
from load_tests.scenarios.cluster.run import LOSSES
from load_tests.scenarios.eviction import FLOOR, KINDS
from load_tests.scenarios.gateway import console
from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.in_turn import https, observability
from load_tests.scenarios.gateway.measure import DELTAS_A_MESSAGE, WHOLE_STEPS
from load_tests.scenarios.gateway.rows import chunk_title
from load_tests.scenarios.kv_parts.memory import cases
from load_tests.scenarios.kv_parts.ttft import LENGTHS
from load_tests.scenarios.policies.grid import GRIDS, POLICIES
from load_tests.scenarios.policies.run import (
    ALL_UP_TO,
    APART,
    APART_NAMES,
    MIXED_NAMES,
    NEAR,
    WITHOUT_PREFIXES,
)
from load_tests.scenarios.policies.run import SIZES as FLEETS
from load_tests.scenarios.regions.selection import SELECTIONS
from load_tests.scenarios.scorecard.run import ROWS
from load_tests.scenarios.simulator.plans import MODELS as PLANNED
from load_tests.scenarios.simulator.run import COMPARED
from load_tests.scenarios.threads.__main__ import STREAMS, VARIANTS
from load_tests.suite.catalog import SCENARIOS
from tests.kit.observability.mix import FAULTS

from kvasir_router.decide import POLICIES as ROUTED


def declared(report: str, beginning: str, end: str) -> set[str]:
    """What stands between the two in the names of declared rows."""
    names = SCENARIOS[report].rows
    found = [name.removeprefix(beginning) for name in names if name.startswith(beginning)]
    return {name.partition(end)[0] for name in found if end in name}


def test_faults_losses_and_the_rows_of_the_scorecard_are_declared() -> None:
    faults = {each.name for each in FAULTS}
    assert {name for name in declared("alerts", "", ": ") if name} == faults
    losses = {name.rpartition(": ")[0] for name in SCENARIOS["cluster"].rows}
    assert losses == {title for title, _ in LOSSES.values()}
    heads = {f"row {number}: {title}" for number, title in ROWS.items()}
    rows = SCENARIOS["scorecard"].rows
    assert all(any(row.startswith(f"{head}, ") for head in heads) for row in rows)
    assert all(any(row.startswith(f"{head}, ") for row in rows) for head in heads)


def test_servers_and_variants_are_declared() -> None:
    assert declared("agreement", "", ": ") == set(LOADS)
    variants = {f"{variant}" for variant in VARIANTS}
    for streams in STREAMS:
        beginning = f"{streams} stream{'s' * (streams > 1)}, "
        assert declared("threads", beginning, ": ") == variants


def test_policies_and_fleets_are_declared() -> None:
    tuned = {f"{name}_tuned" for name in GRIDS}
    for workers in FLEETS:
        known = set(POLICIES if workers <= ALL_UP_TO else NEAR) | tuned
        assert declared("policies", "goodput, ", f", {workers} workers") >= known
    prefill, decode = APART
    apart = declared("policies", "goodput, ", f", {prefill} prefill + {decode} decode")
    assert apart == {*APART_NAMES, *tuned}
    assert declared("policies", "goodput, ", ", mixed, 16 workers") == {*MIXED_NAMES, *tuned}
    azure = {*WITHOUT_PREFIXES, *(name for name in tuned if name.removesuffix("_tuned") in WITHOUT_PREFIXES)}
    assert declared("policies", "goodput, ", ", Azure, 16 workers") == azure
    assert declared("policies", "grid, ", ", ") == set(GRIDS)
    for preset in COMPARED:
        beginning = f"goodput of the fluid bound, {preset}, "
        names = SCENARIOS["sim"].rows
        assert {name.removeprefix(beginning) for name in names if name.startswith(beginning)} == set(ROUTED)
    assert declared("sim", "plan of ", " on four GPU types") == {*PLANNED, "four models"}
    assert declared("eviction", "CPU per block, ", ", 4 workers") == {FLOOR, *KINDS}
    rows = SCENARIOS["regions"].rows
    assert {row.removeprefix("wait p99, ") for row in rows if row.startswith("wait p99, ")} == set(SELECTIONS)


def test_measurements_of_the_gateway_and_of_kv_are_declared() -> None:
    rows = set(SCENARIOS["gateway"].rows)
    assert {f"request, {size.name}" for size in (*SIZES, WARM)} <= rows
    assert {f"chunk, {deltas} deltas a message" for deltas in DELTAS_A_MESSAGE} <= rows
    assert {f"whole request, {deltas} streams a step" for deltas in WHOLE_STEPS} <= rows
    for beginning in (observability.BEGINNING, console.BEGINNING):
        assert any(name.startswith(beginning) for name in rows)
    assert {f"{https.BEGINNING}{chunk_title(deltas)}" for deltas in https.MEASURED} <= rows
    rows = set(SCENARIOS["kv"].rows)
    assert {f"tcp: raw TCP, {case.name}" for case in cases()} <= rows
    assert {f"ttft: from disk, {tokens} tokens" for tokens in LENGTHS} <= rows
