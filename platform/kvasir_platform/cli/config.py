"""`kvasir config`: the schema of kvasir.yaml, and what a file amounts to."""

from __future__ import annotations

import argparse
import json

from kvasir.config.loader import dump, schema
from kvasir.config.yaml_document import render
from kvasir_platform.cli.output import Output
from kvasir_platform.cli.spec_file import chosen_deployment, chosen_file


def config(args: argparse.Namespace, output: Output) -> int:
    """Run one of the actions schema, validate and show."""
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
    pools = ", ".join(f"{pool.name} ({pool.role}, {pool.replicas})" for pool in deployment.pools)
    output.text(f"{source} is valid: {deployment.model.name}, pools {pools}")
    output.data({"valid": True, "file": source, "name": deployment.name})
    return 0
