"""Prints, as JSON, the processes of the container that it runs in.

Of each: `pid`, `started` (clock ticks after the machine's boot, which tells two processes of one id apart),
`name`, `nice`, and `threads`, the variables that set how its threads of OpenMP wait.
"""

import json
from pathlib import Path
from typing import Any

VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def described(folder: Path) -> dict[str, Any]:
    """One process. Raises OSError if it has ended, or is of another user."""
    name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    # The second field, the program in brackets, may contain blanks.
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    pairs = (
        each.partition("=") for each in (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    )
    variables = {key: value for key, _, value in pairs if key in VARIABLES}
    return {
        "pid": int(folder.name),
        "started": int(fields[19]),
        "nice": int(fields[16]),
        "name": name[:120],
        "threads": variables,
    }


def main() -> None:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append(described(folder))
            except OSError:
                continue
    print(json.dumps(found))


if __name__ == "__main__":
    main()
