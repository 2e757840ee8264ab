"""A small share of what was tokenized, tokenized again with the reference.

The proof at start cannot have seen every text. So a few prompts of real traffic are checked now and then, in
a process of its own: the reference takes as much memory as the tokenizer that it checks, and only while it
does so. What that costs is bounded whatever the traffic is: a few hundred thousand characters every five
minutes, at the lowest priority. Prompts go to that process through a pipe and are never written anywhere.

    python -m kvasir_platform.gateway.prompt.tokenizer_audit TOKENIZER_JSON SHA256

is that process: a list of samples in, a list of the numbers of those that differ out, both msgpack.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvasir_platform.gateway.prompt.fast_tokenizer import Reference, file_digest

_log = logging.getLogger(__name__)

INTERVAL_S = 300.0
_MAX_SAMPLES = 32
_MAX_CHARS = 256 << 10
"""Of all samples together: about a quarter of a second of work."""
_TIMEOUT_S = 120.0
_CHANGED = 3
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""What the process inherits; secrets are none of its business."""


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """A text and the tokens that it was given, as native uint32 bytes."""

    text: str
    add_special_tokens: bool
    ids: bytes


Check = Callable[[Sequence[Sample]], list[int]]
"""Gives the numbers of the samples whose tokens the reference would not give. Raises OSError or
subprocess.SubprocessError when it could not be done."""


class TokenizerAudit:
    """Gathers samples, and every INTERVAL_S has them checked in a thread.

    `share` of the texts are taken: those for which `random` gives less. `on_difference` is called in
    that thread, once, and ends the audit.
    """

    def __init__(
        self,
        check: Check,
        on_difference: Callable[[], None],
        *,
        share: float,
        now: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self._check = check
        self._on_difference = on_difference
        self._share = share
        self._now = now
        self._random = random
        self._samples: list[Sample] = []
        self._chars = 0
        self._next_s = now() + INTERVAL_S
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-audit")
        self._running = False
        self._ended = False
        self.checked = 0
        self.different = 0
        self.failed = 0

    def offer(self, text: str, ids: bytes, *, add_special_tokens: bool) -> None:
        """Take this one, perhaps. Thread-safe; never raises, never waits."""
        if self._ended or self._random() >= self._share:
            return
        with self._lock:
            if len(self._samples) < _MAX_SAMPLES and self._chars + len(text) <= _MAX_CHARS:
                self._samples.append(Sample(text, add_special_tokens, ids))
                self._chars += len(text)
            if self._ended or self._running or not self._samples or self._now() < self._next_s:
                return
            samples, self._samples, self._chars = self._samples, [], 0
            self._next_s = self._now() + INTERVAL_S
            self._running = True
            self._thread.submit(self._run, samples)

    def wait(self) -> None:
        """Until the check that runs is over."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """No more checks; one that runs is left to its end."""
        with self._lock:
            self._ended = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, samples: Sequence[Sample]) -> None:
        try:
            different = self._check(samples)
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            if not self.failed:
                _log.warning("the tokenizer could not be checked", extra={"error": repr(error)})
            self.failed += 1
        else:
            self.checked += len(samples)
            self.different += len(different)
            if different:
                self._ended = True
                lengths = [len(samples[i].text) for i in different]
                _log.error(
                    "the fast tokenizer differs from the reference, which serves from here on",
                    extra={"characters": lengths},
                )
                self._on_difference()
        finally:
            self._running = False


def check_apart(path: Path, digest: str) -> Check:
    """Checks in a process of its own. `digest` is the SHA-256 that the tokenizer's file had when it was
    loaded: another file would prove nothing."""

    def check(samples: Sequence[Sample]) -> list[int]:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", __name__, str(path), digest],
            input=msgspec.msgpack.encode(samples),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            | {"TOKENIZERS_PARALLELISM": "false"},
        )
        return msgspec.msgpack.decode(done.stdout, type=list[int])

    return check


def differing(reference: Reference, samples: Sequence[Sample]) -> list[int]:
    """The numbers of the samples to which `reference` gives other tokens."""
    return [
        i
        for i, sample in enumerate(samples)
        if reference.encode([sample.text], add_special_tokens=sample.add_special_tokens)[0] != sample.ids
    ]


def main() -> int:
    """See the module."""
    path, digest = Path(sys.argv[1]), sys.argv[2]
    os.nice(19)
    samples = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[Sample])
    if file_digest(path) != digest:
        return _CHANGED
    sys.stdout.buffer.write(msgspec.msgpack.encode(differing(Reference.from_file(path), samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
