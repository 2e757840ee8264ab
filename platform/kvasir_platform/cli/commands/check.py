"""`kvasir check`: lists everything that would keep a deployment from starting."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from kvasir.config.load.gpu_choice import with_chosen_gpus, with_whole_gpus
from kvasir.config.load.support import engine_platform
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.spec_file import chosen_deployment
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.devices import gpu_devices
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.gpu_memory import fit_findings, with_gpus
from kvasir_platform.cluster.preflight.movement import whole_where_needed
from kvasir_platform.cluster.preflight.probe import installed_packages, probe, probe_models

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def check(args: argparse.Namespace, output: CommandOutput) -> int:
    """Report all findings. Return 1 if one of them is an error. Raises ConfigError."""
    deployment = chosen_deployment(args)
    if args.fit:
        return _fit(deployment, args.gpus, output)
    if args.gpus:
        raise ConfigError("--gpu is for --fit; without it the GPUs of this machine count")
    machine = probe(deployment)
    deployment, findings = whole_where_needed(deployment, machine)
    deployment, chosen = with_gpus(deployment, machine)
    findings += [*chosen, *examine(deployment, machine)]
    verdict = "not ready to start" if has_errors(findings) else "ready to start"
    return _report(findings, verdict, output)


def _fit(deployment: Deployment, named: Sequence[tuple[str, str]], output: CommandOutput) -> int:
    pools = {pool.name for pool in deployment.pools}
    if unknown := [pool for pool, _ in named if pool not in pools]:
        raise ConfigError(f"--gpu {unknown[0]}: there is no such pool; there are {', '.join(sorted(pools))}")
    present = gpu_devices(os.environ)
    deployment = with_whole_gpus(deployment, {pool for pool, _ in named})
    if present and deployment.discovery.kind == "ray":
        platform = engine_platform(installed_packages()) or "cuda"
        deployment = with_chosen_gpus(deployment, present=len(present), platform=platform).deployment

    def devices(pool: PoolSpec) -> Sequence[str]:
        return [gpu for name, gpu in named if name == pool.name] or present

    findings = fit_findings(deployment, probe_models(deployment), devices)
    if has_errors(findings):
        verdict = "not ready to start: change the spec as above"
    elif any(finding.level == "warning" for finding in findings):
        verdict = "nothing is known that would keep it from starting"
    else:
        verdict = "every model fits" if findings else "no pool has a GPU"
    return _report(findings, verdict, output)


def _report(findings: Sequence[Finding], verdict: str, output: CommandOutput) -> int:
    failed = has_errors(findings)
    print_findings(findings, output)
    output.text(verdict)
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
