"""A worker up to the engine: it gets its weights as replicas do, with or without a copy on the node, reads
them into the page cache as vLLM's prefetch does, and ends.

    python -m load_tests.scenarios.sources.reader FIELD=VALUE…
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvasir.config.load.loader import loads
from kvasir.config.load.model_files import resolve_model
from kvasir_workers.engines.vllm.replica import CACHE_FOLDER, served_weights

_PIECE_BYTES = 16 << 20


def read_weights(options: Sequence[str]) -> int:
    """Read the weights of the model that the fields of a spec name; return their bytes."""
    deployment = loads("", "reader", options)
    source = resolve_model(deployment.model.source)
    files = sorted(served_weights(deployment, source, CACHE_FOLDER).glob("*.safetensors"))
    with ThreadPoolExecutor(deployment.model.load.threads) as pool:
        return sum(pool.map(_read, files))


def _read(path: Path) -> int:
    piece, read = bytearray(_PIECE_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            read += count
    return read


if __name__ == "__main__":
    print(read_weights(sys.argv[1:]))
