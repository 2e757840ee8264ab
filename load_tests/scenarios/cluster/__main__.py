"""`python -m load_tests.scenarios.cluster`: see run.py."""

from __future__ import annotations

import sys

from load_tests.scenarios.cluster.run import main

if __name__ == "__main__":
    sys.exit(main())
