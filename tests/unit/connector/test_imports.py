"""An engine imports only the tiers and the transfer that its spec names."""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = ("kvasir_workers.tiers", "kvasir_workers.transfer.nixl", "kvasir_workers.transfer.nccl")


def imported_by(code: str) -> set[str]:
    """Modules of a process of its own after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('imported', *sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("imported ")[2].split())


def named(modules: set[str], *beginnings: str) -> set[str]:
    return {name for name in modules if name.startswith(beginnings)}


def test_an_engine_adapter_imports_no_tier_no_transfer_and_no_client_of_either() -> None:
    modules = imported_by("import kvasir_workers.engines.vllm.engine")
    assert "kvasir_workers.engines.vllm.setup.identity" in modules
    assert not named(modules, *OURS, "redis", "nixl", "torch")


def test_the_connector_s_halves_for_handoffs_import_no_tier() -> None:
    modules = imported_by(
        "import kvasir_workers.connector.handoff.scheduler, kvasir_workers.connector.handoff.worker\n"
        "import kvasir_workers.connector.adapters"
    )
    assert not named(modules, *OURS, "redis", "nixl", "torch")


@pytest.mark.parametrize(("kind", "other"), [("nixl", "nccl"), ("nccl", "nixl")])
def test_only_the_transfer_that_is_chosen_is_imported(kind: str, other: str) -> None:
    pytest.importorskip("torch")
    modules = imported_by(
        "from kvasir_workers.connector.adapters import make_transfer\n"
        f"make_transfer({kind!r}, '127.0.0.1', 1).close()"
    )
    assert named(modules, f"kvasir_workers.transfer.{kind}.adapter")
    assert not named(modules, f"kvasir_workers.transfer.{other}", "kvasir_workers.tiers", "redis")


@pytest.mark.slow
def test_the_connector_itself_imports_neither_tiers_nor_transfers() -> None:
    pytest.importorskip("vllm")
    # torch imports redis by itself where it is installed.
    assert not named(imported_by("import kvasir_workers.connector.connector"), *OURS)
