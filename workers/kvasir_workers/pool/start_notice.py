"""Why the newest replica in this pod did not start, in a file that the pod's startup probe prints.

The kubelet writes what a failed probe prints into an event of the pod. So the reason is an event, and no
container needs a token of the API server.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

NOTICE_VARIABLE = "KVASIR_START_NOTICE"
"""The environment variable with the path of the file; without it, nothing is written."""
MOST_CHARACTERS = 900
"""An event has at most 1,024 characters, with the kubelet's own words."""


def write_notice(environ: Mapping[str, str], message: str, remedy: str = "") -> None:
    """Keep the reason for which a replica did not start, and what to do. A file that cannot be written is
    only logged: the reason is in the pod's output too."""
    path = environ.get(NOTICE_VARIABLE)
    if not path:
        return
    text = " ".join(f"{message}; {remedy}".split() if remedy else message.split())
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(text[:MOST_CHARACTERS], encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("the reason of the failed start is not kept for the startup probe: %s", error)


def remove_notice(environ: Mapping[str, str]) -> None:
    """A replica has started."""
    if path := environ.get(NOTICE_VARIABLE):
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)


def read_notice(environ: Mapping[str, str]) -> str:
    """Return the reason, "" if there is none."""
    path = environ.get(NOTICE_VARIABLE)
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS] if path else ""
    except OSError:
        return ""
