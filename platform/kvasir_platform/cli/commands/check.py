"""`kvasir check`: lists everything that would keep a deployment from starting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.spec_file import chosen_deployment
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.movement import whole_where_needed
from kvasir_platform.cluster.preflight.probe import probe

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def check(args: argparse.Namespace, output: CommandOutput) -> int:
    """Report all findings. Return 1 if one of them is an error."""
    deployment = chosen_deployment(args)
    machine = probe(deployment)
    deployment, findings = whole_where_needed(deployment, machine)
    findings += examine(deployment, machine)
    failed = has_errors(findings)
    print_findings(findings, output)
    output.text("not ready to start" if failed else "ready to start")
    output.data({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    return 1 if failed else 0


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether a start would fail."""
    return any(finding.level == "error" for finding in findings)


def print_findings(findings: Sequence[Finding], output: CommandOutput) -> None:
    """Print one line per finding, and one per remedy."""
    for finding in findings:
        output.text(f"  {_MARKS[finding.level]}  {finding.check:<9} {finding.message}")
        if finding.remedy:
            output.text(f"{'':<21}{finding.remedy}")
