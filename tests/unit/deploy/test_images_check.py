"""The check of images builds what a release builds, and runs it as the chart does."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from tests.helm.rendering import render

from kvasir.config.load.loader import loads
from kvasir.config.load.support import unsupported_features

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    monkeypatch.delitem(sys.modules, "release", raising=False)
    spec = importlib.util.spec_from_file_location("kvasir_images_check", ROOT / "deploy" / "images_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kvasir_images_check", module)
    spec.loader.exec_module(module)
    return module


def test_it_builds_each_containerfile_upon_its_own_base(check: ModuleType) -> None:
    settings = check.Settings(Path("/f"), pip_conf="/p.conf", torch_index="file:///w", volumes=("/a:/b",))
    for name in check.CHECKED:
        command = check.build_command(name, settings)
        assert (ROOT / command[command.index("--file") + 1]).is_file()
        arguments = [value for key, value in pairwise(command) if key == "--build-arg"]
        volumes = [value for key, value in pairwise(command) if key == "--volume"]
        assert f"PYTHON_IMAGE={check.BASE}" in arguments
        assert ("TORCH_INDEX=file:///w" in arguments) is name.startswith("worker")
        assert volumes == ["/a:/b", "/p.conf:/etc/pip.conf:ro"]


def test_containers_are_restricted_as_the_chart_restricts_them(check: ModuleType, tmp_path: Path) -> None:
    command = check.run_command("router", "router", ["kvasir_platform.apps.router_app"], tmp_path)
    pod = next(pod for pod in render().pods() if pod.component == "router")
    security = pod.spec["containers"][0]["securityContext"]
    assert ("--read-only" in command) is security["readOnlyRootFilesystem"]
    assert ("no-new-privileges" in command) is not security["allowPrivilegeEscalation"]
    assert command[command.index("--cap-drop") + 1].upper() == security["capabilities"]["drop"][0]
    # The user is the image's own.
    assert "--user" not in command
    for file in ("Containerfile.router", "Containerfile.worker"):
        assert f"\nUSER {check.USER}:{check.USER}\n" in (ROOT / "deploy" / file).read_text()


def test_processes_accept_its_spec(check: ModuleType) -> None:
    deployment = loads(check.Settings(Path("/f")).spec(), "kvasir.yaml")
    assert deployment.disaggregated
    assert unsupported_features(deployment, platform="cpu") == []


def test_the_base_is_of_the_debian_of_a_release(check: ModuleType) -> None:
    (base,) = sys.modules["release"].BASES.values()
    assert base.endswith(f":{check.PYTHON}-slim-{check.SUITE}")
