"""Recordings as Parquet, which is smaller, for tools that read it. The only module that imports pyarrow,
which is optional.

A row is a request, with the columns of the format `kvasir-workload/1`; what it holds beyond those is JSON in
the columns `outcome` and `decision`. The header is JSON in the file's metadata, under the key `header`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError

_ROWS = 10_000
_KEY = b"header"
_NESTED = ("outcome", "decision")


def require_parquet() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow: install kvasir[parquet], or name a file that ends in .jsonl"
        ) from error


def convert_to_parquet(lines: Path, path: Path) -> None:
    """Write what a recording in JSON lines holds to `path`. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ("tenant", "session", "model", "slo", *_NESTED)
    columns = [
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("prefix_hashes", pa.list_(pa.uint64())),
        ("embeds", pa.bool_()),
        *((name, pa.string()) for name in texts),
    ]
    with lines.open(encoding="utf-8") as source:
        header = source.readline().strip()
        schema = pa.schema(columns).with_metadata({_KEY: header.encode()})
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            while rows := [_flat(json.loads(line)) for line in islice(source, _ROWS)]:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def parquet_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the header and the rows of a recording. Raises ConfigError without pyarrow, OSError, and
    ValueError for a file that is no recording."""
    require_parquet()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            header = (file.schema_arrow.metadata or {}).get(_KEY)
            if header is None:
                raise ValueError(f"{path}: no recording: its metadata has no header")
            yield json.loads(header)
            for batch in file.iter_batches(_ROWS):
                yield from map(_nested, batch.to_pylist())
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: no Parquet file: {error}") from error


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: json.dumps(row[name]) for name in _NESTED if name in row}


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in row.items() if value is not None}
    return known | {name: json.loads(known[name]) for name in _NESTED if name in known}
