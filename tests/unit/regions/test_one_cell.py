"""A router of one cell, which pays nothing for several."""

from __future__ import annotations

import subprocess
import sys


def test_a_router_of_one_cell_loads_nothing_of_several() -> None:
    code = (
        "import sys, kvasir_platform.apps.router_app; "
        "print([name for name in sys.modules if name.startswith(('kvasir_platform.regions', "
        "'kvasir_router.regions'))])"
    )
    done = subprocess.run(  # what is loaded in this process is what its tests imported
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
