"""Compiled modules whose source has changed since: Python would take them instead of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[3]
STALE = "stale_builds"
_SOURCES = ("platform", "router")
_LIBRARY = "compiled__mypyc."


class Builds:
    """Removes all compiled modules if one is older than its source, so that the sources run. To be made
    before a test imports any of them."""

    def __init__(self, root: Path = ROOT) -> None:
        self.stale = stale_modules(root)
        for each in compiled_modules(root) if self.stale else ():
            each.unlink()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Tell the processes of the test run."""
        node.workerinput[STALE] = self.stale

    def pytest_report_header(self) -> str | None:
        """Say what was removed."""
        if not self.stale:
            return None
        changed = ", ".join(self.stale)
        return f"the router runs as Python, since it was compiled before {changed} changed: make install-dev"


def compiled_modules(root: Path) -> list[Path]:
    """Return the compiled modules beside their sources, and the library of all."""
    found = [each for folder in _SOURCES for each in (root / folder).rglob("*.so")]
    return [each for each in found if each.name.startswith(_LIBRARY) or source_of(each).exists()]


def source_of(built: Path) -> Path:
    """Return where the source of a compiled module is."""
    return built.with_name(built.name.partition(".")[0] + ".py")


def stale_modules(root: Path) -> list[str]:
    """Return the compiled modules that are older than their sources."""
    return sorted(each.name.partition(".")[0] for each in compiled_modules(root) if _is_older(each))


def stale_builds(config: pytest.Config) -> list[str]:
    """Return the modules for whose change the compiled ones were removed before this test run."""
    if hasattr(config, "workerinput"):
        return list(config.workerinput[STALE])
    builds = config.pluginmanager.get_plugin("builds")
    return builds.stale if isinstance(builds, Builds) else []


def _is_older(built: Path) -> bool:
    source = source_of(built)
    return source.exists() and built.stat().st_mtime < source.stat().st_mtime
