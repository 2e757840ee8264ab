"""Slow sources of weights: what is read of them is what the files have, and is counted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from load_tests.scenarios.sources import node, streaming
from load_tests.scenarios.sources.bucket import BUCKET, SlowBucket, listing, part
from load_tests.scenarios.sources.link import SlowLink
from load_tests.scenarios.sources.node import NodeReads
from load_tests.scenarios.sources.streaming import ObjectStart
from load_tests.scenarios.sources.volume import SlowVolume, may_mount
from load_tests.suite.catalog import SCENARIOS

CONFIG, WEIGHTS = b"{}", bytes(range(256)) * 1200
FAST = 1e12
"""Bytes per second of a link that nobody waits for."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def test_a_link_carries_one_after_the_other() -> None:
    pauses: list[float] = []
    link = SlowLink(100.0, now=lambda: 5.0, pause=pauses.append)
    for count in (100, 50, 0):
        link.carry(count)
    assert pauses == [1.0, 1.5, 1.5]
    assert link.carried == 150


def test_a_link_that_was_idle_is_free_at_once() -> None:
    times, pauses = iter((0.0, 10.0)), list[float]()
    link = SlowLink(100.0, now=lambda: next(times), pause=pauses.append)
    link.carry(100)
    link.carry(100)
    assert pauses == [1.0, 1.0]


@pytest.mark.parametrize(
    ("asked", "found"),
    [(None, (0, 10)), ("bytes=2-5", (2, 6)), ("bytes=2-", (2, 10)), ("bytes=8-99", (8, 10))],
)
def test_a_range_is_the_part_of_an_object_that_exists(asked: str | None, found: tuple[int, int]) -> None:
    assert part(asked, 10) == found


@pytest.mark.parametrize("asked", ["bytes=10-12", "bytes=-3", "bytes=0-1,4-5", "lines=1-2"])
def test_other_ranges_are_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="no range of 10 bytes"):
        part(asked, 10)


def test_a_listing_has_the_objects_below_a_prefix() -> None:
    answer = ElementTree.fromstring(listing({"a/x&y": 3, "a/z": 4, "b/x": 5}, "a/"))
    space = {"s3": answer.tag[1:].partition("}")[0]}
    found = {
        each.findtext("s3:Key", None, space): each.findtext("s3:Size", None, space)
        for each in answer.findall("s3:Contents", space)
    }
    assert found == {"a/x&y": "3", "a/z": "4"}
    assert answer.findtext("s3:KeyCount", None, space) == "2"


@pytest.fixture
def bucket(model: Path) -> Iterator[tuple[HTTPConnection, SlowLink]]:
    link = SlowLink(FAST)
    with SlowBucket(model, link) as made:
        connection = HTTPConnection(urlsplit(made.variables["AWS_ENDPOINT_URL"]).netloc, timeout=10)
        yield connection, link
        connection.close()


def ask(
    connection: HTTPConnection, method: str, path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    connection.request(method, path, headers=dict(headers or {}))
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read()


def test_a_bucket_serves_parts_of_objects_and_counts_them(bucket: tuple[HTTPConnection, SlowLink]) -> None:
    connection, link = bucket
    path = f"/{BUCKET}/llama/model.safetensors"
    status, headers, body = ask(connection, "HEAD", path)
    assert (status, headers["Content-Length"], body) == (200, str(len(WEIGHTS)), b"")
    status, headers, body = ask(connection, "GET", path, {"Range": "bytes=300-1299"})
    assert (status, body) == (206, WEIGHTS[300:1300])
    assert headers["Content-Range"] == f"bytes 300-1299/{len(WEIGHTS)}"
    assert link.carried == 1000
    assert ask(connection, "GET", path)[2] == WEIGHTS


def test_a_bucket_has_its_own_objects_only(bucket: tuple[HTTPConnection, SlowLink]) -> None:
    connection, link = bucket
    assert b"llama/config.json" in ask(connection, "GET", f"/{BUCKET}?list-type=2&prefix=llama/")[2]
    assert ask(connection, "GET", f"/{BUCKET}/llama/../../etc/passwd")[0] == 404
    assert ask(connection, "GET", f"/{BUCKET}/llama/config.json", {"Range": "bytes=9-"})[0] == 416
    assert link.carried == 0


@pytest.mark.skipif(not may_mount(), reason="mounting a volume needs root and /dev/fuse")
def test_each_mount_of_a_volume_reads_a_file_once(model: Path, tmp_path: Path) -> None:
    link = SlowLink(FAST)

    def read(place: Path, name: str) -> bytes:
        # In another process: this one answers what the kernel asks.
        return subprocess.run(["cat", str(place / name)], capture_output=True, check=True).stdout

    with SlowVolume(model, tmp_path / "a", link), SlowVolume(model, tmp_path / "b", link):
        assert read(tmp_path / "a", "model.safetensors") == WEIGHTS
        assert link.carried == len(WEIGHTS)
        assert read(tmp_path / "a", "model.safetensors") == WEIGHTS
        assert link.carried == len(WEIGHTS)
        assert read(tmp_path / "b", "model.safetensors") == WEIGHTS
        assert link.carried == 2 * len(WEIGHTS)
        listed = subprocess.run(
            ["ls", str(tmp_path / "a")], capture_output=True, check=True, text=True
        ).stdout
        assert listed.split() == ["config.json", "model.safetensors"]
        with pytest.raises(subprocess.CalledProcessError):
            read(tmp_path / "a", "missing")
    assert list((tmp_path / "a").iterdir()) == []


def test_rows_of_a_volume_have_their_floor_and_are_declared() -> None:
    size = 500_000_000
    found = {
        "own": [NodeReads(3 * size, 60.0, 80.0)],
        "cached": [NodeReads(size, 66.0, 40.0)],
        "shared": [NodeReads(size, 60.0, 40.0)],
    }
    rows = {row.name: row for row in node.rows(found, size)}
    assert {name for name in SCENARIOS["scaling"].rows if "workers of a node" in name} == set(rows)
    plain, cached = (
        "3 workers of a node, a mount for each",
        "3 workers of a node, a mount for each, node_cache",
    )
    assert rows[f"{plain}: read from the volume"].ratio == 3.0
    assert rows[f"{plain}: read from the volume"].met is None
    assert rows[f"{cached}: read from the volume"].met
    assert rows[f"{cached}: until the last has its weights"].ratio == 0.5
    assert rows[f"{cached}: CPU of all"].ratio == pytest.approx(1.1)
    found["cached"] = [NodeReads(2 * size, 66.0, 40.0)]
    again = {row.name: row for row in node.rows(found, size)}
    assert again[f"{cached}: read from the volume"].met is False


def test_rows_of_a_bucket_have_their_peer_and_are_declared() -> None:
    found = {
        "warm": [ObjectStart(0, 0, 25.0, 20.0)],
        "downloaded": [ObjectStart(500, 500, 30.0, 40.0)],
        "streamed": [ObjectStart(500, 1, 27.5, 30.0)],
    }
    rows = {row.name: row for row in streaming.rows(found, 500)}
    assert {name for name in SCENARIOS["scaling"].rows if name.startswith("engine start, weights")} == set(
        rows
    )
    assert rows["engine start, weights streamed from a bucket: until it has started"].ratio == 0.75
    assert rows["engine start, weights downloaded from a bucket first: until it has started"].ratio == 2.0
    assert rows["engine start, weights streamed from a bucket: CPU"].ratio == pytest.approx(1.1)
    assert rows["engine start, weights streamed from a bucket: read from the bucket"].ratio == 1.0
