"""`python -m load_tests.scenarios.regions`: see run.py."""

from __future__ import annotations

import sys

from load_tests.scenarios.regions.run import main

if __name__ == "__main__":
    sys.exit(main())
