"""The command line of scenarios without options: `--help` explains them, and anything else is an error."""

from __future__ import annotations

import argparse


def no_options(description: str | None) -> None:
    """Parse a command line that has no options; exit with a message if there are any."""
    argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
