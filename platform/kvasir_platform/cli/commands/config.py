"""`kvasir config`: the schema of kvasir.yaml, validation, and a file with all defaults."""

from __future__ import annotations

import argparse
import json
import os

from kvasir.config.checks.problems import Problem, SpecError
from kvasir.config.load.gpu_choice import with_chosen_gpus
from kvasir.config.load.loader import dump, schema
from kvasir.config.load.support import Platform, engine_platform, unsupported_features
from kvasir.config.load.yaml_document import render
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.spec_file import chosen_deployment, chosen_file
from kvasir_platform.cluster.preflight.devices import gpu_devices
from kvasir_platform.cluster.preflight.gpu_memory import pool_findings
from kvasir_platform.cluster.preflight.machine_facts import draft_name
from kvasir_platform.cluster.preflight.probe import installed_packages, probe_model


def config(args: argparse.Namespace, output: CommandOutput) -> int:
    """Run one of the actions schema, validate and show. Raises SpecError with every error."""
    if args.action == "schema":
        output.text(json.dumps(schema(), indent=2))
        output.data(schema())
        return 0
    deployment = chosen_deployment(args)
    if args.action == "show":
        data = json.loads(dump(deployment))
        output.text(render(data).rstrip())
        output.data(data)
        return 0
    source = str(chosen_file(args) or "the embedded default")
    deployment, chosen = _as_it_runs(deployment)
    _refuse(deployment, source)
    fits = _fits(deployment, source)
    models = ", ".join(view.model.name for view in deployment.views())
    pools = ", ".join(f"{pool.name} ({pool.role}, {pool.replicas})" for pool in deployment.pools)
    output.text(f"{source} is valid: {models}, pools {pools}")
    for line in (*chosen, *fits):
        output.text(f"  {line}")
    gpus = {pool.name: pool.reserved_gpus for pool in deployment.pools}
    output.data({"valid": True, "file": source, "name": deployment.name, "memory": fits, "gpus": gpus})
    return 0


def _as_it_runs(deployment: Deployment) -> tuple[Deployment, list[str]]:
    """Return the deployment with the GPUs that `kvasir up` gives its pools on this machine, and what it says
    of that."""
    if deployment.discovery.kind != "ray":
        return deployment, []
    choice = with_chosen_gpus(
        deployment, present=len(gpu_devices(os.environ)), platform=_platform(deployment)
    )
    return choice.deployment, [choice.reason] if choice.reason else []


def _platform(deployment: Deployment) -> Platform:
    """Return the platform of the GPUs that pools name, or else of the installed engine, or else the CPU."""
    # A pool that names its GPU is meant for another machine than this one.
    named = any(pool.gpu is not None for pool in deployment.pools)
    return "cuda" if named else engine_platform(installed_packages()) or "cpu"


def _refuse(deployment: Deployment, source: str) -> None:
    """Raises SpecError with what the engine does not support."""
    problems = []
    for refusal in unsupported_features(deployment, platform=_platform(deployment)):
        field, _, rest = refusal.partition(": ")
        found, _, remedy = rest.partition("; ")
        problems.append(Problem(source, field=field, found=found, expected=remedy))
    if problems:
        raise SpecError(problems)


def _fits(deployment: Deployment, source: str) -> list[str]:
    """Return the arithmetic for each pool that names its GPU and whose model is here. Raises SpecError with
    those that do not fit."""
    lines, problems = [], []
    for view in deployment.views():
        for pool in view.pools:
            if pool.gpu is None or pool.engine.kind != "vllm":
                continue
            model = probe_model(view.model.source, view.model.revision)
            name = draft_name(pool)
            draft = None if name is None else probe_model(*name)
            for finding in pool_findings(view, pool, model, (), draft):
                lines.append(finding.message)
                if finding.level == "error":
                    problems.append(
                        Problem(
                            source, field=f"pools.{pool.name}", found=finding.message, expected=finding.remedy
                        )
                    )
    if problems:
        raise SpecError(problems)
    return lines
