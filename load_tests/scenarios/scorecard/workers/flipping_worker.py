"""A worker process whose engine loads the connector of flipping_connector.py."""

from __future__ import annotations

import sys

from kvasir_platform.apps import worker_node
from kvasir_workers.engines.vllm.setup import arguments

PROGRAM = "load_tests.scenarios.scorecard.workers.flipping_worker"
CONNECTOR = "load_tests.scenarios.scorecard.workers.flipping_connector"
FLIP_FILE = "KVASIR_FLIP_FILE"
FLIP_AT = "KVASIR_FLIP_AT"
SENDER, RECEIVER = "prefill", "decode"
"""Where a bit may flip: the pools whose workers run this."""

if __name__ == "__main__":
    arguments.CONNECTOR_MODULE = CONNECTOR
    sys.exit(worker_node.main())
