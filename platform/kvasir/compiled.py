"""Whether what a router executes for every request is compiled; `compiled.txt` says which modules that is.

They are ordinary modules of Python, which run without a compiler too, in over a third more instructions for a
short request (by hand).
"""

from __future__ import annotations

from importlib.util import find_spec

LIBRARY = "kvasir.compiled__mypyc"


def is_compiled() -> bool:
    """Return whether the compiled modules are in use."""
    return find_spec(LIBRARY) is not None
