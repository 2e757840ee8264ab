"""Desired pods change under a running process; an invalid file changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.apps.common.pods_file import PodsFile
from kvasir_platform.cluster.ray.pod_templates import PodTemplate

OLD, NEW = "0123456789ab", "ba9876543210"


def desired(template: str, spaces: str = "") -> str:
    return f'{spaces}{{"decode": {{"template": "{template}", "pods": 2}}}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "pods.json"
    made.write_text(desired(OLD))
    return made


def test_another_wish_is_seen_once(path: Path) -> None:
    file = PodsFile(path)
    assert not file.changed()
    path.write_text(desired(NEW))
    assert file.changed()
    assert file.pods == {"decode": PodTemplate(NEW, 2)}
    assert not file.changed()


def test_the_same_wish_in_other_words_is_no_change(path: Path) -> None:
    file = PodsFile(path)
    path.write_text(desired(OLD, spaces="  "))
    assert not file.changed()


def test_what_is_not_valid_is_said_once_and_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = PodsFile(path)
    path.write_text("{")
    assert not file.changed()
    assert not file.changed()
    assert len([each for each in caplog.messages if "has changed and is ignored" in each]) == 1
    assert file.pods == {"decode": PodTemplate(OLD, 2)}
    path.unlink()
    assert not file.changed()
    path.write_text(desired(NEW))
    assert file.changed()


def test_the_revision_is_that_of_the_pods_that_are_valid(path: Path) -> None:
    file = PodsFile(path)
    assert file.revision == 0
    revision = path.with_name("revision")
    revision.write_text("3")
    assert not file.changed()
    assert file.revision == 3
    revision.write_text("4")
    path.write_text("{")
    assert not file.changed()
    assert not file.changed()
    assert file.revision == 3
    path.write_text(desired(NEW))
    assert file.changed()
    assert file.revision == PodsFile(path).revision == 4


def test_without_a_file_nothing_is_wished() -> None:
    file = PodsFile(None)
    assert (file.pods, file.revision, file.changed()) == ({}, 0, False)


def test_a_file_that_is_not_there_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        PodsFile(tmp_path / "absent")
