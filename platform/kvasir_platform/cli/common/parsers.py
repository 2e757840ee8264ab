"""Parsers of commands and of their actions, all made alike. Every call of `kvasir` imports this module, so it
needs the standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command or an action: see `adder`."""


def adder(commands: argparse._SubParsersAction[Any], *shared: argparse.ArgumentParser) -> Add:
    """Return what adds a command with the options of `shared`. It takes the name, a line that says what the
    command does, parsers of further options, the end of its help, and a description in place of that line."""

    def add(
        name: str, text: str, *parents: argparse.ArgumentParser, epilog: str = "", description: str = ""
    ) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name,
            parents=[*shared, *parents],
            help=text,
            description=description or f"{text[0].upper()}{text[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return made

    return add


def actions_of(command: argparse.ArgumentParser, *shared: argparse.ArgumentParser) -> Add:
    """Return what adds an action to a command, which is `action` of its arguments."""
    return adder(command.add_subparsers(dest="action", required=True, metavar="ACTION"), *shared)
