"""The source root `platform/` must never shadow the standard library's module of that name."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = Path(sysconfig.get_path("stdlib")) / "platform.py"
SHOW = "import platform; print(platform.__file__); platform.system()"


@pytest.mark.parametrize("where", [ROOT, ROOT / "platform", Path("/")], ids=["root", "platform", "elsewhere"])
@pytest.mark.parametrize("also", ["", "import kvasir, kvasir_platform; "], ids=["alone", "with kvasir"])
def test_import_platform_is_the_standard_librarys(where: Path, also: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", also + SHOW], cwd=where, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == STANDARD


def test_the_source_root_is_no_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
