"""Images are built from digests that a registry returned, never from a tag or an invented digest."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
DIGEST = "sha256:" + "ab" * 32
TAG = "registry.example:5000/team/kvasir-router:0.1.0"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvasir_release", ROOT / "deploy" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvasir_release"] = module
    spec.loader.exec_module(module)
    return module


release = _load()


class Shell:
    """Answers as the tools would, and keeps what was run."""

    def __init__(self, digest: str = DIGEST) -> None:
        self.ran: list[list[str]] = []
        self._digest = digest

    def __call__(self, command: Sequence[str]) -> str:
        self.ran.append(list(command))
        return "{}\n" if "requirements/sbom.py" in command else f"{self._digest}\n"


@pytest.fixture
def digests(tmp_path: Path) -> Path:
    path = tmp_path / "digests.json"
    path.write_text(json.dumps(dict.fromkeys(release.BASES.values(), DIGEST)))
    return path


def test_every_base_of_every_image_is_its_digest(digests: Path) -> None:
    shell = Shell()
    release.build("worker-gpu", TAG, push=False, tools=["docker"], run=shell, digests=digests)
    command = shell.ran[0]
    assert f"PYTHON_IMAGE=docker.io/library/python@{DIGEST}" in command
    assert "PLATFORM=gpu" in command
    assert command[command.index("--file") + 1] == "deploy/Containerfile.worker"
    assert (digests.parent / "worker-gpu.sbom.cdx.json").read_text() == "{}\n"


@pytest.mark.parametrize("text", [None, "{}", '{"docker.io/library/python:3.11-slim-bookworm": "sha256:0"}'])
def test_without_a_digest_nothing_is_built_and_the_remedy_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "digests.json"
    if text is not None:
        path.write_text(text)
    shell = Shell()
    with pytest.raises(release.ReleaseError, match=r"deploy/release\.py digests"):
        release.build("router", TAG, push=False, tools=["docker"], run=shell, digests=path)
    assert shell.ran == []


def test_digests_that_are_kept_are_whole() -> None:
    if release.DIGESTS.exists():
        assert release.pinned(release.DIGESTS)


@pytest.mark.parametrize("tool", ["skopeo", "crane", "docker"])
def test_digests_come_from_the_registry(tool: str) -> None:
    shell = Shell()
    assert release.look_up("docker.io/library/python:3", [tool], shell) == DIGEST
    assert shell.ran[0][0] == tool


def test_what_is_no_digest_is_not_kept() -> None:
    with pytest.raises(release.ReleaseError, match="no digest"):
        release.look_up("docker.io/library/python:3", ["crane"], Shell("manifest unknown"))


@pytest.mark.parametrize("tag", ["registry.example:5000/kvasir", "kvasir:latest", "kvasir"])
def test_an_image_without_a_version_is_refused(tag: str, digests: Path) -> None:
    with pytest.raises(release.ReleaseError, match="version"):
        release.build("router", tag, push=False, tools=["docker"], run=Shell(), digests=digests)


def test_a_pushed_image_is_told_by_its_digest(digests: Path) -> None:
    shell = Shell()
    digest = release.build("router", TAG, push=True, tools=["podman", "skopeo"], run=shell, digests=digests)
    assert digest == DIGEST
    assert ["podman", "push", TAG] in shell.ran


def test_each_image_has_the_bill_of_materials_of_what_it_installs() -> None:
    for image in release.IMAGES.values():
        assert (ROOT / "requirements" / f"{image.lock}.lock").exists()
        assert "requirements/" in (ROOT / image.containerfile).read_text()


def locked(name: str) -> dict[str, str]:
    """The versions in a lock file, by package; of several for different Pythons, the last."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", text, re.MULTILINE))


def test_what_builds_the_images_has_all_that_the_project_is_built_with() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pins = locked("build")
    for requirement in map(Requirement, required):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_every_image_has_the_python_that_locks_are_resolved_for() -> None:
    (resolved,) = re.findall(r"--python-version (\S+)", (ROOT / "requirements" / "lock.sh").read_text())
    assert resolved == release.PYTHON
    assert {re.sub(r".*/python:([0-9.]+)-.*", r"\1", base) for base in release.BASES.values()} == {resolved}
