"""Checks a release on a live Kubernetes cluster, under a load of streams: losses, upgrades, an installation.

It needs kubectl and helm, with rights on the namespace, and disturbs the release: use one that serves nobody.
docs/CLUSTER_CHECKS.md says what each check does, the same commands by hand, and what to expect.

    python -m load_tests.cluster_checks --namespace llm --release kvasir
    python -m load_tests.cluster_checks --namespace llm --release kvasir --only head,redis
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from load_tests.cluster_checks.checks import CHECKS
from load_tests.cluster_checks.findings import CheckError
from load_tests.cluster_checks.site import Site
from load_tests.cluster_checks.tools import LocalTools, Tools


def checked(name: str, site: Site) -> bool:
    """Make one check and print what it finds. False if anything is not as expected, or it came to no end."""
    check, met, began = CHECKS[name], True, site.tools.now()
    print(f"{name}: {check.title}", flush=True)
    try:
        for finding in check.act(site):
            met = met and finding.met
            print(finding.line(), flush=True)
    except CheckError as error:
        met = False
        print(f"  BAD {error}", flush=True)
    print(f"  {site.tools.now() - began:.0f} s", flush=True)
    return met


def main(argv: Sequence[str] | None = None, tools: Tools | None = None) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.cluster_checks", description=__doc__, formatter_class=shape
    )
    parser.add_argument("--namespace", help="of the release")
    parser.add_argument("--release", default="kvasir", help="its name for helm (kvasir)")
    parser.add_argument("--chart", default="helm/kvasir", help="the chart to upgrade with (helm/kvasir)")
    parser.add_argument("--only", help="some checks, as in head,redis; --list shows all")
    parser.add_argument("--list", action="store_true", help="list the checks and what they need")
    parser.add_argument("--streams", type=int, default=2, help="streams at a time (2)")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream (100)")
    parser.add_argument("--times", type=int, default=10, help="how often the head is lost (10)")
    parser.add_argument("--image", default="busybox:1.36", help="of pods that debug a node (busybox:1.36)")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="every stream must have the same text, which holds for greedy streams in float32 (model.dtype)",
    )
    args = parser.parse_args(argv)
    if args.list:
        for name, check in CHECKS.items():
            print(f"{name:13} {check.title}{f' (needs {check.needs})' if check.needs else ''}")
        return 0
    names = list(CHECKS) if args.only is None else args.only.split(",")
    if unknown := [each for each in names if each not in CHECKS]:
        parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if not args.namespace:
        parser.error("name the namespace of the release: --namespace")
    for name, value in (("streams", args.streams), ("tokens", args.tokens), ("times", args.times)):
        if value < 1:
            parser.error(f"--{name}: at least 1")
    site = Site(
        tools or LocalTools(),
        args.namespace,
        args.release,
        args.chart,
        args.streams,
        args.tokens,
        args.exact,
        args.times,
        args.image,
    )
    bad = [name for name in names if not checked(name, site)]
    print(f"not as expected: {', '.join(bad)}" if bad else "all as expected", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
