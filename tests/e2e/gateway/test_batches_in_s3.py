"""The Batch API over an S3 server: gateways that share a bucket, and a bucket that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.gateway.test_batches import answer, batching, ended, line, rows_of, submitted
from tests.kit.gateway.http_edge import serving
from tests.kit.gateway.scripted_router import ScriptedStream
from tests.kit.lab.s3_server import ENVIRONMENT, S3Server

from kvasir.config.spec.edge import BatchesSpec, GatewaySpec
from kvasir.core.errors import ConfigError


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with S3Server() as server:
        yield server


async def test_gateways_share_a_bucket_and_go_on_with_what_one_leaves(s3: S3Server) -> None:
    unused = Path()
    options: dict[str, Any] = {"storage": f"s3://{s3.bucket()}/batches", "s3": {"endpoint": s3.url}}

    def some(stream: ScriptedStream) -> None:
        # The rest stays unanswered: the process ends in mid-batch.
        if int(stream.request.request_id[-1], 16) % 2:
            answer(stream)

    async with batching(unused, options) as (_, second):
        async with batching(unused, options) as (first, client):
            first.router.script = some
            batches = [await submitted(client, map(line, range(10))) for _ in range(2)]
        for batch in batches:
            done = await ended(second, batch.id)
            assert done.status == "completed"
            rows = await rows_of(second, done.output_file_id)
            assert Counter(row["custom_id"] for row in rows) == {f"line-{i}": 1 for i in range(10)}


async def test_a_gateway_does_not_start_without_its_bucket(s3: S3Server) -> None:
    spec: dict[str, Any] = {"storage": "s3://not-there/batches", "s3": {"endpoint": s3.url}}
    batches = BatchesSpec.model_validate(spec)
    with pytest.raises(ConfigError, match="there is no bucket not-there"):
        async with serving(GatewaySpec(port=0, drain_timeout_s=0.0, batches=batches)):
            pass


async def test_a_gateway_starts_without_a_server_that_does_not_answer(s3: S3Server) -> None:
    spec: dict[str, Any] = {"storage": "s3://bucket/batches", "s3": {"endpoint": "http://127.0.0.1:1"}}
    batches = BatchesSpec.model_validate(spec)
    async with serving(GatewaySpec(port=0, drain_timeout_s=0.0, batches=batches)) as edge:
        assert edge.port
