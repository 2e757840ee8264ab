"""Installed packages are the locked ones: exact versions, file hashes, and a bill of materials."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.lock"))


def load_sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", REQUIREMENTS / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sbom"] = module
    spec.loader.exec_module(module)
    return module


sbom = load_sbom()


def distribution(name: str) -> str:
    """A name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_each_locked_package_has_an_exact_version_and_hashes(lock: Path) -> None:
    text = lock.read_text()
    packages = sbom.packages(text)
    assert packages
    assert [package.name for package in packages if not package.hashes] == []
    assert "://" not in re.sub(r"#.*", "", text)
    assert "--index-url" not in text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_each_wanted_package_is_locked(lock: Path) -> None:
    wanted = {
        distribution(re.split(r"[\[=<>~! ;]", line)[0])
        for line in lock.with_suffix(".in").read_text().splitlines()
        if line and not line.startswith(("#", "-"))
    }
    assert wanted - {distribution(package.name) for package in sbom.packages(lock.read_text())} == set()


def test_the_makefile_installs_locked_packages_by_their_hashes_only() -> None:
    lines = (REQUIREMENTS.parent / "Makefile").read_text().splitlines()
    installs = [line for line in lines if "$(PIP) install" in line and " -r " in line]
    assert installs
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_the_bill_of_materials_names_all_that_is_installed_and_is_the_same_each_time(lock: Path) -> None:
    run = [sys.executable, str(REQUIREMENTS / "sbom.py"), lock.stem]
    first, second = (subprocess.run(run, check=True, capture_output=True).stdout for _ in range(2))
    assert first == second
    bill = json.loads(first)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    pinned = {(package.name, package.version) for package in sbom.packages(lock.read_text())}
    assert {(part["name"], part["version"]) for part in bill["components"]} == pinned
    refs = {part["bom-ref"] for part in bill["components"]}
    assert len(refs) == len(bill["components"])
    assert all(set(entry["dependsOn"]) <= refs for entry in bill["dependencies"])
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])


def test_a_bill_of_materials_tells_who_needs_whom() -> None:
    digest = "0" * 64
    hashed = f" \\\n    --hash=sha256:{digest}\n"
    text = f"a==1.0{hashed}    # via b\nb==2.0+cpu ; os_name == 'nt'{hashed}"
    bill = sbom.sbom(text)
    assert [part["purl"] for part in bill["components"]] == ["pkg:pypi/a@1.0", "pkg:pypi/b@2.0%2Bcpu"]
    assert {"ref": "pkg:pypi/b@2.0%2Bcpu", "dependsOn": ["pkg:pypi/a@1.0"]} in bill["dependencies"]
    assert bill["components"][1]["properties"] == [{"name": "kvasir:marker", "value": "os_name == 'nt'"}]


def test_an_unpinned_line_is_no_lock() -> None:
    with pytest.raises(ValueError, match="line 1 is neither"):
        sbom.packages("requests>=2\n")
