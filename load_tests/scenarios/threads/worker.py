"""A worker whose OpenMP threads wait as the variable KVASIR_BENCH_WAIT says: PASSIVE, ACTIVE, or `default`
for what the library does by itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from kvasir_platform.apps import worker_node
from kvasir_workers.engines.vllm import replica

VARIABLE = "KVASIR_BENCH_WAIT"
DEFAULT = "default"


def main() -> int:
    """Run kvasir_platform.apps.worker_node."""
    names, policy = vars(replica), os.environ[VARIABLE]
    usual = names["environment"]

    def environment(*args: Any, **kwargs: Any) -> dict[str, str]:
        variables: dict[str, str] = usual(*args, **kwargs)
        del variables["OMP_WAIT_POLICY"]
        return variables if policy == DEFAULT else variables | {"OMP_WAIT_POLICY": policy}

    names["environment"] = environment
    return worker_node.main()


if __name__ == "__main__":
    sys.exit(main())
