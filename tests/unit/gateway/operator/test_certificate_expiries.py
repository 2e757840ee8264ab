"""The expiry of a certificate follows its file, which is read only after a change."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.observability.mix import write_certificate

from kvasir.wire.tls import read_pem
from kvasir_platform.gateway.operator.facts.certificate_expiries import CertificateExpiries

NOW = 1_800_000_000.0
DAY_S = 86_400.0


class CountedReads:
    """Reads files, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: Path) -> bytes:
        self.count += 1
        return read_pem(path)


def test_a_file_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    file, read = tmp_path / "tls.pem", CountedReads()
    write_certificate(file, NOW, NOW + 10 * DAY_S)
    expiries = CertificateExpiries([str(file)], read)
    for second in range(3):
        assert expiries.left_s(NOW + second) == {str(file): 10 * DAY_S - second}
    assert read.count == 1
    new = tmp_path / "new.pem"
    write_certificate(new, NOW, NOW + 90 * DAY_S)
    new.rename(file)
    assert expiries.left_s(NOW) == {str(file): 90 * DAY_S}
    assert read.count == 2


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_that_cannot_be_read_counts_as_expired_until_it_can(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tls.pem"
    if text is not None:
        file.write_text(text)
    expiries = CertificateExpiries([str(file)])
    assert expiries.left_s(NOW)[str(file)] < 0.0
    write_certificate(file, NOW, NOW + DAY_S)
    assert expiries.left_s(NOW)[str(file)] == DAY_S
