"""`kvasir verify`: measures a running deployment, and checks that its answers are right."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.cli.verify.report import (
    CURVE_HEAD,
    TRANSFER_HEAD,
    as_json,
    curve_rows,
    transfer_rows,
    write_report,
)
from kvasir_platform.cli.verify.run import Verification, Verifier, VerifyOptions

_MARKS = {"pass": "ok ", "fail": "ERR", "skip": "-- "}


def verify(
    options: VerifyOptions, site: Site, prefix: Path | None, output: CommandOutput, now: datetime
) -> int:
    """Run all steps, print what was found and write the report. Return 1 if a check failed."""
    if prefix is not None and not prefix.parent.is_dir():
        raise ConfigError(f"--report {prefix}: {prefix.parent} is not a folder")
    verifier = Verifier(
        site,
        options,
        lambda text: output.text(f"... {text}"),
        began=now.isoformat(timespec="seconds"),
        rng=random.Random(),  # noqa: S311 - unique prompts, no secrets
    )
    found = verifier.run()
    output.data(as_json(found))
    _print(found, output)
    if prefix is not None:
        try:
            written = write_report(found, prefix)
        except OSError as error:
            raise ConfigError(f"--report {prefix}: {error.strerror or error}") from error
        output.text(f"\nreport: {', '.join(map(str, written))}")
    return 0 if found.passed else 1


def _print(found: Verification, output: CommandOutput) -> None:
    output.text(f"\n{found.deployment}: {found.model}, disaggregation {found.disaggregation}")
    for each in found.hardware:
        output.text(f"  {each}")
    output.text()
    for check in found.checks:
        output.text(f"{_MARKS[check.result]} {check.name}: {check.detail}")
    if found.transfers:
        output.text(f"\n{table(TRANSFER_HEAD, transfer_rows(found), range(5))}")
    if found.curve:
        output.text(f"\n{table(CURVE_HEAD, curve_rows(found.curve), range(7))}")
