"""What looks at a gateway while it is measured: a collector of traces, the console and Prometheus.

    python -m tests.kit.observability.gateway_observer

It prints the collector's address as a line of JSON. For each line `{"address": ..., "key": ...}` on its
standard input, it looks at that gateway from then on: it reads what the console's first view is sent, once a
second, and /metrics every 15 s.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse

from tests.kit.gateway.otlp_collector import collector

_LIVE = "/console/live?pages=status"
_SCRAPE = "/metrics"
_SCRAPE_S = 15.0
_RETRY_S = 1.0
_ANSWER_S = 5.0


def watch(address: str, key: str, ended: threading.Event) -> None:
    """Read the console's stream, which the gateway ends after some minutes, again and again."""

    def follow(stream: HTTPResponse) -> None:
        while stream.read1(1 << 16) and not ended.is_set():
            pass

    while not ended.is_set():
        _read(address, _LIVE, key, follow)
        ended.wait(_RETRY_S)


def scrape(address: str, key: str, ended: threading.Event) -> None:
    """Read the metrics as Prometheus does."""
    while not ended.wait(_SCRAPE_S):
        _read(address, _SCRAPE, key, HTTPResponse.read)


def _read(address: str, path: str, key: str, read: Callable[[HTTPResponse], object]) -> None:
    """Read the answer to a request; errors are printed."""
    connection = HTTPConnection(address, timeout=_ANSWER_S)
    accepted = "application/openmetrics-text"
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}", "Accept": accepted})
        answer = connection.getresponse()
        if answer.status == HTTPStatus.OK:
            read(answer)
        else:
            sys.stderr.write(f"{address}{path}: {answer.status} {answer.read(500)!r}\n")
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
            for look in (watch, scrape):
                args = asked["address"], asked["key"], ended
                threading.Thread(target=look, args=args, daemon=True).start()
            _say({"looks_at": asked["address"]})
    ended.set()


def _say(what: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
