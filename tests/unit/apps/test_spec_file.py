"""A ConfigMap that changes under the control process: a valid one is applied once, others are ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.apps.common.spec_file import SpecFile

SPEC = "version: kvasir/v1\nname: kvasir\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "kvasir.yaml"
    made.write_text(SPEC)
    return made


def test_a_file_that_stays_has_not_changed(path: Path) -> None:
    assert SpecFile(path, None).changed() is None


def test_a_change_is_told_once_with_the_certificates_of_every_pod(path: Path) -> None:
    file = SpecFile(path, Path("/etc/kvasir/tls"))
    path.write_text(SPEC + "worker: {drain_s: 7}\n")
    changed = file.changed()
    assert changed is not None
    assert (changed.worker.drain_s, changed.tls.directory) == (7, "/etc/kvasir/tls")
    assert file.deployment is changed
    assert file.changed() is None


@pytest.mark.parametrize(
    "text",
    ["worker: {drain_s: soon}", "name: another", SPEC + "# said otherwise", ""],
    ids=["no spec", "another deployment", "the same in other words", "the defaults again"],
)
def test_what_is_not_valid_or_not_another_spec_is_left_alone(path: Path, text: str) -> None:
    file = SpecFile(path, None)
    before = file.deployment
    path.write_text(text)
    assert file.changed() is None
    assert file.deployment is before


def test_a_mount_that_is_away_for_a_moment_is_no_change(path: Path) -> None:
    file = SpecFile(path, None)
    path.unlink()
    assert file.changed() is None
    path.write_text(SPEC)
    assert file.changed() is None


def test_a_first_file_that_is_no_spec_is_refused(path: Path) -> None:
    path.write_text("name: [")
    with pytest.raises(ConfigError):
        SpecFile(path, None)
