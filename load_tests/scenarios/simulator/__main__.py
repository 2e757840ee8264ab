"""Runs the bench of the simulator: `make bench-sim`."""

from __future__ import annotations

import sys

from load_tests.scenarios.simulator.run import main

if __name__ == "__main__":
    sys.exit(main())
