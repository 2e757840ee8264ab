"""The options of `kvasir lora`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.numbers import positive
from kvasir_platform.cli.common.parsers import Add, actions_of
from kvasir_platform.cli.help_texts import LORA_EPILOG, LORA_LOAD_EPILOG, LORA_UNLOAD_EPILOG

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

WAIT_S = 150.0


def add_lora(add: Add, shared: argparse.ArgumentParser, gateway: argparse.ArgumentParser) -> None:
    """Add the command and its actions."""
    lora = add(
        "lora",
        "load and unload LoRA adapters while it serves",
        description="Load and unload LoRA adapters while a deployment serves.",
        epilog=LORA_EPILOG,
    )
    act = actions_of(lora, shared, gateway)
    act("list", "list the adapters that were loaded while it serves, and their workers")
    load = act("load", "load an adapter, which is then served as a model", epilog=LORA_LOAD_EPILOG)
    load.add_argument("adapter", metavar="NAME", help="what clients send as `model`")
    load.add_argument(
        "source", metavar="SOURCE", help="a folder, s3://BUCKET/PREFIX, or OWNER/NAME[@REVISION]"
    )
    load.add_argument("--model", metavar="MODEL", help="its base model, if several are served")
    load.add_argument("--replicas", type=int, metavar="N", help="workers of each pool (all)")
    unload = act("unload", "unload an adapter when its requests have ended", epilog=LORA_UNLOAD_EPILOG)
    unload.add_argument("adapter", metavar="NAME", help="as `kvasir lora list` shows it")
    for each in (load, unload):
        each.add_argument(
            "--timeout",
            type=positive,
            default=WAIT_S,
            metavar="S",
            help=f"wait at most S seconds ({WAIT_S:.0f})",
        )


def run_lora(args: argparse.Namespace, site: Site, output: CommandOutput) -> int:
    """Run the action. Raises KvasirError."""
    from kvasir_platform.cli.commands import lora

    if args.action == "list":
        return lora.list_adapters(site, output)
    if args.action == "unload":
        return lora.unload(args.adapter, args.timeout, site, output)
    desired = lora.LoadArguments(args.adapter, args.source, args.model, args.replicas, args.timeout)
    return lora.load(desired, site, output)
