"""Import contracts between our packages; no engine is imported where none is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Prints every module of the named packages; fails on the first import of anything that the base lock
# does not hold. Run in a process of its own: nothing else may have imported an engine before.
BASE_ONLY = """
import importlib, importlib.abc, importlib.metadata, pkgutil, sys

allowed = set(sys.argv[1].split(","))
owners = importlib.metadata.packages_distributions()

class OnlyBase(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        distributions = {d.lower().replace("_", "-") for d in owners.get(top, ())}
        if distributions and "kvasir" not in distributions and not distributions & allowed:
            raise ModuleNotFoundError(f"{name} is not in the base install", name=name)
        return None

sys.meta_path.insert(0, OnlyBase())
for module in sys.argv[2:]:
    loaded = importlib.import_module(module)
    for info in pkgutil.walk_packages(getattr(loaded, "__path__", ()), module + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
assert not {"torch", "vllm", "ray", "nixl"} & set(sys.modules)
"""

BASE_INSTALL = ["kvasir", "kvasir_router", "kvasir_platform.gateway", "kvasir_platform.cli"]
ROUTER_PROCESS = [
    "kvasir_platform.apps.router_app",
    "kvasir_platform.apps.edge_app",
    "kvasir_platform.apps.up_app",
    "kvasir_platform.apps.fetch_model",
]


def base_distributions() -> set[str]:
    lock = (ROOT / "requirements" / "base.lock").read_text()
    return set(re.findall(r"^([a-z0-9][-a-z0-9._]*)==", lock, re.MULTILINE))


@pytest.mark.parametrize("package", BASE_INSTALL + ROUTER_PROCESS)
def test_the_base_install_imports_without_torch_vllm_or_ray(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, ",".join(sorted(base_distributions())), package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_blocker_sees_an_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, "numpy", "torch"], capture_output=True, text=True, check=False
    )
    assert "torch is not in the base install" in done.stderr


def test_imports_flow_one_way() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
