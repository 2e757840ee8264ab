"""Copies a folder of a bucket to a local one with boto3, several files at a time: what is done where weights
are not streamed.

    python -m load_tests.scenarios.sources.download BUCKET PREFIX FOLDER
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FILES = 8


def download(bucket: str, prefix: str, folder: Path) -> None:
    """Copy all objects whose keys begin with `prefix`/ into `folder`, which is created."""
    # Installed with the streamer, and not with Kvasir.
    client = importlib.import_module("boto3").client("s3")
    folder.mkdir(parents=True, exist_ok=True)
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    with ThreadPoolExecutor(_FILES) as pool:
        copies = [
            pool.submit(client.download_file, bucket, each["Key"], str(folder / Path(each["Key"]).name))
            for each in listed
        ]
        for each in copies:
            each.result()


if __name__ == "__main__":
    download(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
