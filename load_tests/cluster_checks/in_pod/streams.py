"""Streams completions through the router of the pod that it runs in, until its input ends.

The first line of the input has the settings, as JSON. One stream runs alone and shows the text that is
expected; then a line `ready` is printed, and streams run in parallel. At the end of the input it prints what
clients have noticed, as JSON.
"""

import collections
import http.client
import json
import sys
import threading
import time
from typing import Any

TIMEOUT_S = 120.0
START_S = 300.0
PAUSE_S = 0.2
KEPT_ERRORS = 10


class Refused(Exception):
    """503; `waits`: the answer says after how long to ask again."""

    def __init__(self, message: str, waits: bool) -> None:
        super().__init__(message)
        self.waits = waits


class Broken(Exception):
    """Any other end than that of a whole stream."""


def stream(settings: dict[str, Any]) -> tuple[str, list[float]]:
    """The text of one stream and the seconds between its chunks. Raises Refused, Broken and OSError."""
    body = {
        "model": settings["model"],
        "prompt": "Once upon a time",
        "max_tokens": settings["tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings['key']}"}
    connection = http.client.HTTPConnection(settings["host"], settings["port"], timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            said = f"{answer.status}: {answer.read(500).decode(errors='replace')}"
            if answer.status == 503:
                raise Refused(said, answer.getheader("Retry-After") is not None)
            raise Broken(said)
        return whole(answer, settings["tokens"])
    except http.client.HTTPException as error:
        raise Broken(repr(error)) from error
    finally:
        connection.close()


def whole(lines: Any, tokens: int) -> tuple[str, list[float]]:
    """The text of a stream with `tokens` tokens and its gaps. Raises Broken for any other one."""
    gaps: list[float] = []
    text, last, used = "", 0.0, 0
    for line in lines:
        data = line.decode().strip()
        if data == "data: [DONE]":
            if used != tokens:
                raise Broken(f"{used} tokens in place of {tokens}")
            return text, gaps
        if not data.startswith("data: "):
            continue
        event = json.loads(data[len("data: ") :])
        if "error" in event:
            raise Broken(str(event["error"]))
        used = (event.get("usage") or {}).get("completion_tokens", used)
        if event["choices"]:
            now = time.monotonic()
            if last:
                gaps.append(now - last)
            last = now
            text += event["choices"][0]["text"]
    raise Broken(f"cut after {len(text)} characters")


class Noticed:
    """What clients have noticed."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        self.counts: collections.Counter[str] = collections.Counter()
        self.gaps: collections.Counter[int] = collections.Counter()
        self.longest_s = 0.0
        self.errors: list[str] = []
        self.lock = threading.Lock()

    def ended(self, text: str, gaps: list[float]) -> None:
        """A stream that ended as it should."""
        with self.lock:
            self.counts["streams"] += 1
            self.counts["other_texts"] += text != self.expected
            self.longest_s = max([self.longest_s, *gaps])
            # A tenth of a millisecond: few enough numbers for hours of streams.
            self.gaps.update(int(gap * 1e4) for gap in gaps)

    def failed(self, kind: str, error: Exception) -> None:
        """A request that did not."""
        with self.lock:
            self.counts[kind] += 1
            if len(self.errors) < KEPT_ERRORS:
                self.errors.append(str(error) or repr(error))

    def gap_ms(self, share: float) -> float:
        """A percentile of the time between two chunks."""
        left = share * sum(self.gaps.values())
        for tenths, count in sorted(self.gaps.items()):
            left -= count
            if left <= 0:
                return (tenths + 1) / 10
        return 0.0

    def summary(self) -> dict[str, Any]:
        names = ("streams", "other_texts", "failed", "refused_with_wait", "refused_without_wait")
        return {
            **{name: self.counts[name] for name in names},
            "longest_gap_s": self.longest_s,
            "itl_p50_ms": self.gap_ms(0.5),
            "itl_p99_ms": self.gap_ms(0.99),
            "errors": self.errors,
        }


def client(settings: dict[str, Any], noticed: Noticed, stop: threading.Event) -> None:
    """Streams one after another."""
    while not stop.is_set():
        try:
            noticed.ended(*stream(settings))
        except Refused as error:
            noticed.failed("refused_with_wait" if error.waits else "refused_without_wait", error)
            stop.wait(PAUSE_S)
        except (Broken, OSError, ValueError) as error:
            noticed.failed("failed", error)
            stop.wait(PAUSE_S)


def expected(settings: dict[str, Any]) -> str:
    """The text of a stream that runs alone, once the router serves one. Raises what the last attempt did."""
    until = time.monotonic() + settings.get("start_s", START_S)
    while True:
        try:
            return stream(settings)[0]
        except (Refused, Broken, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    noticed, stop = Noticed(expected(settings)), threading.Event()
    threads = [
        threading.Thread(target=client, args=(settings, noticed, stop)) for _ in range(settings["streams"])
    ]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(noticed.summary()), flush=True)


if __name__ == "__main__":
    main()
