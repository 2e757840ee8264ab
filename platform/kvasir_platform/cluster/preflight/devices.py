"""The NVIDIA GPUs that the driver shows to this process, read from its files: its library takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_devices(
    environ: Mapping[str, str], devices: Path = DEVICES, driver: Path = DRIVER
) -> tuple[str, ...]:
    """Return the name of each GPU, "" if the driver does not state it. CUDA_VISIBLE_DEVICES lowers their
    number."""
    present = len([entry for entry in devices.glob("nvidia[0-9]*") if entry.name[6:].isdigit()])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        present = min(present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    names = [_name(path) for path in sorted(driver.glob("*/information"))] if present else []
    return tuple((names + [""] * present)[:present])


def _name(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return next(found, "")
