"""`kvasir config`: the schema of kvasir.yaml, validation, and a file with all defaults."""

from __future__ import annotations

import argparse
import json

from kvasir.config.checks.problems import Problem, SpecError
from kvasir.config.load.loader import dump, schema
from kvasir.config.load.support import engine_platform, unsupported_features
from kvasir.config.load.yaml_document import render
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.spec_file import chosen_deployment, chosen_file
from kvasir_platform.cluster.preflight.gpu_memory import pool_findings
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
    _refuse(deployment, source)
    fits = _fits(deployment, source)
    models = ", ".join(view.model.name for view in deployment.views())
    pools = ", ".join(f"{pool.name} ({pool.role}, {pool.replicas})" for pool in deployment.pools)
    output.text(f"{source} is valid: {models}, pools {pools}")
    for line in fits:
        output.text(f"  {line}")
    output.data({"valid": True, "file": source, "name": deployment.name, "memory": fits})
    return 0


def _refuse(deployment: Deployment, source: str) -> None:
    """Raises SpecError with what the engine does not support: that of the GPUs that pools name, or else the
    installed one, or else the CPU's."""
    problems = []
    # A pool that names its GPU is meant for another machine than this one.
    named = any(pool.gpu is not None for pool in deployment.pools)
    platform = "cuda" if named else engine_platform(installed_packages()) or "cpu"
    for refusal in unsupported_features(deployment, platform=platform):
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
            for finding in pool_findings(view, pool, model, ()):
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
