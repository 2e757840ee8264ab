"""`python -m load_tests.scenarios.policies`: see run.py."""

from __future__ import annotations

import sys

from load_tests.scenarios.policies.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
