"""Why pools do not start, in a file that another container of the head's pod reads.

The control process parses what engines send, and has no token of the API server. The container that has one
reads these few words, and makes an event of them: `kvasir_platform.apps.cluster_events`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MOST_CHARACTERS = 900
"""An event has at most 1,024 characters, with what is said before."""
MOST_BYTES = 256 << 10
_EVENT = "start_failed"

Tell = Callable[..., None]
"""See kvasir_platform.apps.common.reporter.Reporter.event."""


@dataclass(frozen=True, slots=True)
class FailedPool:
    """The newest failed start of a pool: which attempt it was, when the next one is (ISO 8601), and why."""

    pool: str
    attempt: int
    next_at: str
    message: str


class FailedStartsFile:
    """Writes the file at `path`, which readers find whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pools: dict[str, FailedPool] = {}

    def noting(self, tell: Tell) -> Tell:
        """Return a `tell` that keeps the failed starts too. A file that cannot be written is only logged: the
        reason is in the pod's output."""

        def keeping(name: str, **details: object) -> None:
            tell(name, **details)
            if name == _EVENT:
                self._note(details)

        return keeping

    def _note(self, details: Mapping[str, object]) -> None:
        message = " ".join(str(details["message"]).split())[:MOST_CHARACTERS]
        pool, attempt = str(details["pool"]), int(str(details["attempt"]))
        self._pools[pool] = FailedPool(pool, attempt, str(details["next_at"]), message)
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            text = json.dumps([asdict(each) for each in self._pools.values()])
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            log.warning("failed starts are not kept for events: %s", error)


def read_failed_starts(path: Path) -> tuple[FailedPool, ...]:
    """Return the newest failed start of each pool, none if there is no file or it is not one of these."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_BYTES)
        return tuple(
            FailedPool(
                str(each["pool"]),
                int(each["attempt"]),
                str(each["next_at"]),
                str(each["message"])[:MOST_CHARACTERS],
            )
            for each in json.loads(text)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return ()
