"""The startup probe of a worker's pod: whether its engine serves, and if not, why its last start failed.

    python -m kvasir_platform.apps.worker_probe --port 7002

The kubelet writes what this prints into an event of the pod. The port of health checks is open once the
engine serves. It imports nothing large, since it runs every few seconds while a model loads.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from kvasir_workers.pool.start_notice import read_notice

TIMEOUT_S = 2.0
POD_IP = "KVASIR_POD_IP"


def reason(host: str, port: int, environ: Mapping[str, str]) -> str:
    """Return why the worker at this address does not serve yet, "" if it does."""
    try:
        with socket.create_connection((host, port), TIMEOUT_S):
            return ""
    except OSError:
        notice = read_notice(environ)
    return f"the engine did not start: {notice}" if notice else "the engine is starting"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-worker-probe", description="Tell whether a worker serves.")
    parser.add_argument("--port", type=int, required=True, help="port of its health checks")
    args = parser.parse_args(argv)
    why = reason(os.environ.get(POD_IP, "127.0.0.1"), args.port, os.environ)
    if why:
        sys.stdout.write(f"{why}\n")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
