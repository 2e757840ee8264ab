"""The deployment that a command reads: `-f`, ./kvasir.yaml or the embedded default, and `--set`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError

DEFAULT_FILE = Path("kvasir.yaml")


def chosen_file(args: argparse.Namespace) -> Path | None:
    """Return the file to read, None for the embedded default. Raises ConfigError if two are named."""
    named: list[Path] = [file for file in (args.file, getattr(args, "path", None)) if file is not None]
    if len(named) > 1:
        raise ConfigError(f"two files are named, {named[0]} by -f and {named[1]}; name one")
    if named:
        return named[0]
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def chosen_deployment(args: argparse.Namespace) -> Deployment:
    """Return the deployment with overrides applied. Raises SpecError with every error."""
    overrides = list(args.overrides)
    if getattr(args, "port", None) is not None:
        overrides.append(f"gateway.port={args.port}")
    return load(chosen_file(args), overrides)
