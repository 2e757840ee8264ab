"""`python -m load_tests.cluster_checks`: see run.py."""

from __future__ import annotations

import sys

from load_tests.cluster_checks.run import main

if __name__ == "__main__":
    sys.exit(main())
