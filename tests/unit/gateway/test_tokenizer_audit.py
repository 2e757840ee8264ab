"""What the fast tokenizer gets wrong in real traffic is found, at a bounded cost."""

from __future__ import annotations

import subprocess
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.gateway.prompt.fast_tokenizer import Reference, file_digest
from kvasir_platform.gateway.prompt.tokenizer_audit import INTERVAL_S, Sample, TokenizerAudit, check_apart

TINY = resolve_model("kvasir-tiny") / "tokenizer.json"


class Audited:
    """An audit under a clock of our own, whose checks find what they are told."""

    def __init__(self, *, share: float = 1.0, error: Exception | None = None) -> None:
        self.now = 0.0
        self.draw = 0.0
        self.found: list[int] = []
        self.batches: list[list[Sample]] = []
        self.differences = 0
        self._error = error
        self._checked = threading.Semaphore(0)
        self.audit = TokenizerAudit(
            self._check, self._differs, share=share, now=lambda: self.now, random=lambda: self.draw
        )

    def offer(self, text: str) -> None:
        self.audit.offer(text, b"12345678", add_special_tokens=False)

    def due(self, text: str = "due") -> None:
        """Offer when a check is due, and wait until it is over."""
        self.now += INTERVAL_S
        self.offer(text)
        assert self._checked.acquire(timeout=10)
        self.audit.wait()

    def _check(self, samples: Sequence[Sample]) -> list[int]:
        self.batches.append(list(samples))
        self._checked.release()
        if self._error is not None:
            raise self._error
        return self.found

    def _differs(self) -> None:
        self.differences += 1


@pytest.fixture
def audited() -> Audited:
    return Audited()


def test_what_was_offered_is_checked_once_the_interval_is_over(audited: Audited) -> None:
    audited.offer("one")
    audited.offer("two")
    assert audited.batches == []
    audited.due("three")
    assert [[sample.text for sample in batch] for batch in audited.batches] == [["one", "two", "three"]]
    assert audited.batches[0][0].ids == b"12345678"
    assert audited.audit.checked == 3
    audited.offer("too soon")
    assert len(audited.batches) == 1
    audited.due()
    assert [sample.text for sample in audited.batches[1]] == ["too soon", "due"]


def test_only_a_share_is_taken(audited: Audited) -> None:
    audited = Audited(share=0.25)
    audited.draw = 0.3
    audited.offer("not me")
    audited.draw = 0.2
    audited.due("me")
    assert [sample.text for sample in audited.batches[0]] == ["me"]


def test_samples_are_bounded_in_number_and_in_length(audited: Audited) -> None:
    audited.offer("x" * (300 << 10))
    for i in range(1000):
        audited.offer(f"{i} " + "y" * 100)
    audited.due()
    assert len(audited.batches[0]) == 32
    assert sum(len(sample.text) for sample in audited.batches[0]) <= 256 << 10


def test_a_difference_is_told_once_and_ends_the_audit(
    audited: Audited, caplog: pytest.LogCaptureFixture
) -> None:
    audited.offer("a secret prompt")
    audited.found = [0]
    audited.due()
    audited.now += 10 * INTERVAL_S
    audited.offer("later")
    assert (audited.differences, audited.audit.different, len(audited.batches)) == (1, 1, 1)
    assert "secret" not in caplog.text
    assert "secret" not in str([record.__dict__ for record in caplog.records])


def test_an_audit_that_cannot_be_done_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    audited = Audited(error=subprocess.TimeoutExpired("x", 1.0))
    audited.due()
    audited.due()
    assert (audited.audit.failed, audited.audit.checked, audited.differences) == (2, 0, 0)
    assert len(caplog.records) == 1


def test_a_closed_audit_checks_nothing(audited: Audited) -> None:
    audited.audit.close()
    audited.now += 2 * INTERVAL_S
    audited.offer("x")
    assert audited.batches == []


@pytest.mark.slow
def test_a_process_of_its_own_finds_what_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    reference = Reference.from_file(TINY)
    samples = [
        Sample(text, special, reference.encode([text], add_special_tokens=special)[0])
        for text in ("Once upon a time", "<|user|>é 東京<|end|>", "")
        for special in (False, True)
    ]
    check = check_apart(TINY, file_digest(TINY))
    assert check(samples) == []
    wrong = Sample("Once", False, array("I", [5]).tobytes())
    assert check([samples[0], wrong, samples[1]]) == [1]
    with pytest.raises(subprocess.CalledProcessError):
        check_apart(TINY, "another file's")(samples)
    with pytest.raises(subprocess.CalledProcessError):
        check_apart(tmp_path / "gone.json", "0")(samples)
