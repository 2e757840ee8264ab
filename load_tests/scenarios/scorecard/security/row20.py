"""Workers and routers without a valid identity, and certificate rotation under load."""

from __future__ import annotations

from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard.security import tls_trials

PROMISE = "no registration, no KV"


async def measure(trial: Trial) -> list[Figure]:
    """Measure the row."""
    counts = await tls_trials.run_row(trial.folder)
    if not counts.attempts or not counts.rotations or not counts.streams:
        raise NotProven(f"{counts.attempts} impostors, {counts.rotations} changes, {counts.streams} streams")
    return [
        Figure("impostors accepted", counts.accepted, "sessions", "lower", 0.0, f"of {counts.attempts}"),
        Figure(
            "streams dropped on rotation", counts.dropped, "streams", "lower", 0.0,
            f"of {counts.streams}, over {counts.rotations} changes of certificates and authorities",
        ),
    ]  # fmt: skip
