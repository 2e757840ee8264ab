"""The contents of the images, as far as they can be checked without building them."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from kvasir.config.load.loader import load

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy").glob("Containerfile.*"))
STAGE = re.compile(r"^FROM ", re.MULTILINE)
# Modules that a container's command names.
ENTRY = re.compile(r"kvasir_platform\.apps\.[a-z_]+")


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction with its words, lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    last = max(at for at, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


def copied(path: Path) -> list[str]:
    """What is copied from the repository."""
    sources: list[str] = []
    for word, rest in instructions(path):
        if word in ("COPY", "ADD") and "--from=" not in rest:
            sources.extend(rest.split()[:-1])
    return sources


def test_there_is_a_router_and_a_worker() -> None:
    assert [path.name for path in FILES] == ["Containerfile.router", "Containerfile.worker"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
class TestEveryContainerfile:
    def test_is_built_on_nothing_but_a_digest_that_has_to_be_given(self, path: Path) -> None:
        bases = [rest.split()[0] for word, rest in instructions(path) if word == "FROM"]
        assert len(bases) > 1, "what builds must not be what runs"
        assert set(bases) == {"${PYTHON_IMAGE}"}
        defaults = [rest for word, rest in instructions(path) if word == "ARG" and "PYTHON_IMAGE" in rest]
        # A name that cannot exist, so that a build without a digest fails with the remedy in its message.
        assert defaults == ["PYTHON_IMAGE=digest-is-not-filled.invalid/run:deploy-release.py"]
        assert ":latest" not in path.read_text()

    def test_runs_as_a_user_who_is_not_root_and_is_told_by_number(self, path: Path) -> None:
        users = [rest for word, rest in last_stage(path) if word == "USER"]
        assert users
        assert all(re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user) for user in users)

    def test_installs_locked_packages_by_their_hashes_only(self, path: Path) -> None:
        runs = " && ".join(rest for word, rest in instructions(path) if word == "RUN").split("&&")
        installs = [command for command in runs if re.search(r"\binstall\b", command) and "pip" in command]
        assert installs
        for command in installs:
            assert "--no-deps" in command
            assert "--require-hashes" in command or "--editable ." in command

    def test_is_copied_from_sources_that_exist_and_that_the_build_may_see(self, path: Path) -> None:
        lines = (ROOT / ".containerignore").read_text().splitlines()
        allowed = [line[1:].rstrip("/") for line in lines if line.startswith("!")]
        for source in copied(path):
            assert (ROOT / source).exists(), source
            assert source not in (".", "./")
            # A folder of which a part is allowed, or something within what is allowed.
            assert any(
                fnmatch(source.rstrip("/"), each) or each.startswith(source) or source.startswith(f"{each}/")
                for each in allowed
            ), source

    def test_leaves_pip_in_what_builds(self, path: Path) -> None:
        assert "python -m venv --without-pip /opt/venv" in path.read_text()
        assert not any("pip" in rest for word, rest in last_stage(path) if word == "RUN")

    def test_has_no_secret_in_it(self, path: Path) -> None:
        for word, rest in instructions(path):
            assert word not in ("ADD", "VOLUME")
            if word in ("ENV", "ARG"):
                assert not re.search(r"(?i)secret|password|token|api_key", rest)


def test_the_router_image_has_no_compiler_and_no_worker() -> None:
    router = ROOT / "deploy" / "Containerfile.router"
    assert [word for word, _ in last_stage(router) if word == "RUN"] == []
    assert {"platform/", "router/"} <= set(copied(router))
    assert "workers/" not in copied(router)
    assert "requirements/base.lock" in copied(router)


def test_the_cpu_image_of_the_worker_has_no_compiler() -> None:
    runs = " ".join(
        rest for word, rest in last_stage(ROOT / "deploy" / "Containerfile.worker") if word == "RUN"
    )
    assert "g++" not in runs
    assert re.search(r'\[ "\$\{PLATFORM\}" = gpu \] && echo "gcc', runs)


def test_each_module_that_an_image_starts_exists() -> None:
    texts = [path.read_text() for path in (*FILES, ROOT / "deploy" / "compose.yaml")]
    named = {name for text in texts for name in ENTRY.findall(text)}
    assert {"kvasir_platform.apps.router_app", "kvasir_platform.apps.worker_pod"} <= named
    for name in named:
        assert (ROOT / "platform" / name.replace(".", "/")).with_suffix(".py").exists(), name


@pytest.mark.slow
def test_the_router_needs_nothing_that_its_image_does_not_have() -> None:
    absent = ("torch", "vllm", "ray", "nixl", "kvasir_workers")
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import kvasir_platform.apps.router_app, kvasir_platform.cli.main
import kvasir_platform.cluster.kubernetes.discovery
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_try_out_names_images_that_have_to_be_given_and_is_closed_to_the_network() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert re.match(r"\$\{KVASIR_[A-Z]+_IMAGE:\?", service["image"])
        assert service["user"] == "65532:65532"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "ports" not in service
        assert service["mem_limit"]
        for volume in service["volumes"]:
            assert (ROOT / "deploy" / volume.split(":")[0]).exists()


def test_the_try_out_s_workers_are_where_its_router_looks_for_them() -> None:
    deployment = load(ROOT / "deploy" / "compose-kvasir.yaml")
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    told = set()
    for service in compose["services"].values():
        options = dict(word.split("=") for word in service["command"][1:])
        if "--pool" in options:
            told.add(f"{options['--pool']}=127.0.0.1:{options['--port']}")
    assert told == set(deployment.discovery.endpoints)
    assert deployment.gateway.host == deployment.worker.host == "127.0.0.1"
    # Streams may end before compose kills the process.
    for service in compose["services"].values():
        assert int(service["stop_grace_period"].rstrip("s")) > deployment.worker.drain_s
