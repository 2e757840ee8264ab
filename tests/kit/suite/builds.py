"""Compiled modules whose source has changed since: Python would take them instead of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

ROUTER = Path(__file__).parents[3] / "router" / "kvasir_router"
STALE = "stale_builds"


class Builds:
    """Removes the compiled modules of the router if one is older than its source, so that the source runs.
    To be made before a test imports any of them."""

    def __init__(self, router: Path = ROUTER) -> None:
        self.stale = stale_modules(router)
        for each in router.rglob("*.so") if self.stale else ():
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


def stale_modules(router: Path) -> list[str]:
    """Return the compiled modules of a router that are older than their sources."""
    return sorted(each.name.partition(".")[0] for each in router.rglob("*.so") if _is_older(each))


def stale_builds(config: pytest.Config) -> list[str]:
    """Return the modules for whose change the compiled ones were removed before this test run."""
    if hasattr(config, "workerinput"):
        return list(config.workerinput[STALE])
    builds = config.pluginmanager.get_plugin("builds")
    return builds.stale if isinstance(builds, Builds) else []


def _is_older(built: Path) -> bool:
    source = built.with_name(built.name.partition(".")[0] + ".py")
    return source.exists() and built.stat().st_mtime < source.stat().st_mtime
