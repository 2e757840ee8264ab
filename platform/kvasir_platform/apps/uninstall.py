"""Takes a release out of its cluster before Helm does: the Job of the chart's pre-delete hook.

    python -m kvasir_platform.apps.uninstall --cluster NAME --credentials FOLDER --redis-url redis://HOST:PORT

Helm deletes all objects of a release at once. A RayCluster cannot finish its deletion without some of them,
stays in deletion, and takes a later installation of the same name with it. So it goes first, with its pods
and its state.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from kvasir.config.spec.redis import RedisServerSpec
from kvasir.core.errors import KvasirError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.cluster_removal import KubernetesRayCluster, remove_cluster
from kvasir_platform.cluster.kubernetes.head_state import delete_head_state

REDIS_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-uninstall", description="Remove a release's RayCluster.")
    parser.add_argument("--cluster", required=True, help="name of the RayCluster")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="how long its pods are waited for")
    parser.add_argument("--credentials", type=Path, required=True, help="folder of the service account")
    parser.add_argument("--redis-url", default="", help="where Ray's head stores its state; empty: nowhere")
    parser.add_argument("--redis-username", default=None)
    parser.add_argument("--redis-password-file", default=None)
    parser.add_argument("--redis-ca-file", default=None)
    args = parser.parse_args(argv)
    if not 0.0 < args.timeout_s < math.inf:
        parser.error(f"argument --timeout-s: {args.timeout_s:g} is not a number of seconds above 0")
    try:
        clean = _cleaner(args)
        remove_cluster(
            KubernetesRayCluster(Access.in_cluster(args.credentials, os.environ), args.cluster),
            clean,
            patience_s=args.timeout_s,
            now=time.monotonic,
            pause=time.sleep,
            say=_say,
        )
    except ValidationError as error:
        sys.stderr.write(f"kvasir-uninstall: --redis-url: {error.errors()[0]['msg']}\n")
        return 1
    except KvasirError as error:
        sys.stderr.write(f"kvasir-uninstall: {error.message}\n")
        return 1
    return 0


def _cleaner(args: argparse.Namespace) -> Callable[[str], int] | None:
    if not args.redis_url:
        return None
    server = RedisServerSpec(
        url=args.redis_url,
        username=args.redis_username,
        password_file=args.redis_password_file,
        ca_file=args.redis_ca_file,
    )
    return lambda storage: asyncio.run(delete_head_state(server, storage, REDIS_S))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
