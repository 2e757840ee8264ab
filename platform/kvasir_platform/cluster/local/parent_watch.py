"""Runs a command in a process group of its own that must not outlive its parent, even if that is killed.

Executed as a script: `python -S -E parent_watch.py PARENT_PID COMMAND ARG…`. It requests SIGTERM from the
kernel on the parent's death and becomes the command. The setting must be made inside the child, because a
fork clears it, and without running Python between fork and exec of a threaded parent. So is the process
group, which uvloop cannot set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Bind this process to its parent's life and replace it by the command in `argv[2:]`."""
    parent, command = int(argv[1]), argv[2:]
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            raise SystemExit("the parent ended before its child began")
    os.execvp(command[0], command)  # noqa: S606 - the supervisor built this command line


if __name__ == "__main__":
    main(sys.argv)
