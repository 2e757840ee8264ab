"""What `helm test` runs: one streamed completion through the gateway, as a client would ask for it.

It waits for workers, which may still load weights, and fails when no token comes or the stream has no end.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

PAUSE_S = 3.0
MAX_TOKENS = 16


class NotServed(Exception):
    """The gateway answered, or did not, and a later try may succeed."""


def ask(url: str, model: str, key: str, timeout_s: float, tls: ssl.SSLContext | None) -> str:
    """The text of a streamed completion. Raises NotServed for what may pass, ValueError for a bad stream."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "stream": True}
    request = urllib.request.Request(  # noqa: S310 - the chart names the gateway
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=tls) as answer:  # noqa: S310 - as above
            return text_of(line.decode().rstrip("\r\n") for line in answer)
    except urllib.error.HTTPError as error:
        told = error.read(2000).decode(errors="replace")
        if error.code in (429, 502, 503, 504):
            raise NotServed(f"{error.code}: {told}") from error
        raise ValueError(f"the gateway answers {error.code}: {told}") from error
    except OSError as error:
        raise NotServed(str(error)) from error


def text_of(lines: Iterable[str]) -> str:
    """The text of a completion's server-sent events. Raises ValueError where it has none, or no end."""
    text, chunks, ended = "", 0, False
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            ended = True
            break
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream broke off: {event['error']}")
        for choice in event.get("choices", []):
            chunks += 1
            text += choice["text"]
    if not ended:
        raise ValueError("the stream has no end ([DONE])")
    if not text:
        raise ValueError(f"the stream has no text ({chunks} chunks)")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--ca-file", type=Path)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    args = parser.parse_args(argv)
    key = args.key_file.read_text(encoding="ascii").strip()
    tls = ssl.create_default_context(cafile=args.ca_file) if args.url.startswith("https:") else None
    deadline = time.monotonic() + args.timeout_s
    while True:
        try:
            text = ask(args.url, args.model, key, args.timeout_s, tls)
        except NotServed as error:
            if time.monotonic() + PAUSE_S > deadline:
                sys.stderr.write(f"not served within {args.timeout_s:.0f} s: {error}\n")
                return 1
            time.sleep(PAUSE_S)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        else:
            sys.stdout.write(f"a completion was streamed: {text!r}\n")
            return 0


if __name__ == "__main__":
    sys.exit(main())
