"""What looks at a gateway while it is measured: a collector of traces, the console and Prometheus.

    python -m tests.kit.observability.gateway_observer

It prints the collector's address as a line of JSON. For each line `{"address": ..., "key": ...}` on its
standard input, it reads the pages of that gateway from then on: /status and /requests once a second, as the
console does, and /metrics every 15 s.
"""

from __future__ import annotations

import json
import sys
import threading
from http.client import HTTPConnection, HTTPException

from tests.kit.gateway.otlp_collector import collector

_EVERY_S = 1.0
_SCRAPE = 15
_ANSWER_S = 5.0


def look(address: str, key: str, ended: threading.Event) -> None:
    """Read the pages of a gateway until it ends."""
    seconds = 0
    while not ended.wait(_EVERY_S):
        seconds += 1
        for path in ("/status", "/requests", *(["/metrics"] if seconds % _SCRAPE == 0 else [])):
            connection = HTTPConnection(address, timeout=_ANSWER_S)
            try:
                accepted = "application/openmetrics-text"
                connection.request(
                    "GET", path, headers={"Authorization": f"Bearer {key}", "Accept": accepted}
                )
                connection.getresponse().read()
            except (OSError, HTTPException) as error:
                sys.stderr.write(f"{address}{path}: {error!r}\n")
            finally:
                connection.close()


def main() -> None:
    """Serve until standard input ends."""
    ended = threading.Event()
    with collector() as receiver:
        _say({"collector": receiver.address})
        for line in sys.stdin:
            asked = json.loads(line)
            threading.Thread(target=look, args=(asked["address"], asked["key"], ended), daemon=True).start()
            _say({"looks_at": asked["address"]})
    ended.set()


def _say(what: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
