"""`python -m load_tests.scenarios.instructions`: see run.py."""

from __future__ import annotations

from load_tests.scenarios.instructions.run import main

if __name__ == "__main__":
    main()
