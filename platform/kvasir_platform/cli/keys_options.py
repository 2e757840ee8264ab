"""The options of `kvasir keys`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.numbers import seconds
from kvasir_platform.cli.common.parsers import Add, actions_of
from kvasir_platform.cli.help_texts import KEYS_EPILOG, KEYS_ROTATE_EPILOG, KEYS_STORE_EPILOG

if TYPE_CHECKING:
    from kvasir_platform.cli.commands.keys import KeyStore, NewKey
    from kvasir_platform.cli.common.output import CommandOutput

_OVERLAP_S = 86_400.0


def add_keys(add: Add, shared: argparse.ArgumentParser, spec: argparse.ArgumentParser) -> None:
    """Add the command and its actions."""
    keys = add(
        "keys",
        "create, list, rotate and revoke API keys",
        description="Create, list, rotate and revoke API keys of clients.",
        epilog=KEYS_EPILOG,
    )
    act = actions_of(keys, shared)
    stored = argparse.ArgumentParser(add_help=False, parents=[spec])
    stored.add_argument("--keys-file", metavar="PATH", help="a file of keys other than those of kvasir.yaml")
    create = act("create", "store a key, and print it once", stored, epilog=KEYS_STORE_EPILOG)
    new = act("new", "print a key, once, and its line to store", epilog=KEYS_STORE_EPILOG)
    for each in (create, new):
        each.add_argument(
            "--tenant", default="default", metavar="NAME", help="its tenant, as in tenancy.tenants (default)"
        )
        each.add_argument("--days", type=int, metavar="N", help="its lifetime; unlimited if not given")
        each.add_argument(
            "--scopes",
            default="",
            metavar="LIST",
            help="what it may be used for, as inference,embeddings; also operator:read and operator (all)",
        )
    act("list", "list the keys by their ids", stored, epilog=KEYS_STORE_EPILOG)
    revoke = act(
        "revoke", "remove keys, which are refused within two seconds", stored, epilog=KEYS_STORE_EPILOG
    )
    revoke.add_argument("keys", nargs="+", metavar="ID", help="as `kvasir keys list` shows it")
    rotate = act(
        "rotate", "store the successor of a key, which expires later", stored, epilog=KEYS_ROTATE_EPILOG
    )
    rotate.add_argument("key", metavar="ID", help="as `kvasir keys list` shows it")
    rotate.add_argument(
        "--overlap",
        type=seconds,
        default=_OVERLAP_S,
        metavar="TIME",
        help="how long the old key stays valid, as 90, 15m or 2h (24h)",
    )
    rotate.add_argument(
        "--days", type=int, metavar="N", help="the new key's lifetime; that of the old one if not given"
    )


def run_keys(args: argparse.Namespace, output: CommandOutput) -> int:
    """Run the action. Raises KvasirError."""
    from datetime import UTC, datetime

    from kvasir_platform.cli.commands import keys

    now = datetime.now(UTC)
    if args.action == "new":
        return keys.keys_new(_wanted(args), output, now)
    store, tenants = _store(args)
    if args.action == "create":
        return keys.keys_create(_wanted(args), store, tenants, output, now)
    if args.action == "list":
        return keys.keys_list(store, output, now)
    if args.action == "revoke":
        return keys.keys_revoke(args.keys, store, output)
    return keys.keys_rotate(keys.Rotation(args.key, args.overlap, args.days), store, output, now)


def _wanted(args: argparse.Namespace) -> NewKey:
    from kvasir_platform.cli.commands.keys import NewKey

    return NewKey(args.tenant, args.days, tuple(filter(None, args.scopes.split(","))))


def _store(args: argparse.Namespace) -> tuple[KeyStore, frozenset[str]]:
    """Return where keys are stored, and the tenants that there are."""
    from kvasir_platform.cli.common.spec_file import chosen_deployment
    from kvasir_platform.gateway.identity.key_files import FileKeys

    deployment = chosen_deployment(args)
    gateway, redis = deployment.gateway, deployment.tenancy.redis
    names = frozenset(tenant.name for tenant in deployment.tenancy.all_tenants())
    if gateway.api_keys_redis and redis is not None and args.keys_file is None:
        from kvasir_platform.gateway.tenants.redis_keys import RedisKeyStore

        return RedisKeyStore(redis), names
    if args.keys_file is not None:
        gateway = gateway.model_copy(update={"api_keys_file": args.keys_file, "api_keys_dir": None})
    return FileKeys(gateway), names
