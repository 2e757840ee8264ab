"""A batch whose router is killed twice: each line has one result, and none that has one is executed again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.s3_server import ENVIRONMENT, S3Server

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.edge import BatchesSpec
from kvasir_platform.gateway.batches.storage.journal import Journal
from kvasir_platform.gateway.batches.storage.local_storage import LocalStorage
from kvasir_platform.gateway.batches.storage.s3_storage import S3Storage

pytestmark = [pytest.mark.slow, pytest.mark.soak]

LINES = 10_000
KILL_AT = (2_000, 6_000)


@pytest.fixture(params=["folder", "s3"])
def batches(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Where the deployment keeps its batches, as the spec says it."""
    if request.param == "folder":
        yield {"storage": str(tmp_path / "batches")}
        return
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with S3Server() as server:
        yield {"storage": f"s3://{server.bucket()}/batches", "s3": {"endpoint": server.url}}


def deployment(batches: dict[str, Any]) -> Deployment:
    engine = {
        "kind": "sim",
        "block_size": 16,
        "max_num_seqs": 256,
        "sim": {"prefill_tokens_per_s": 1e6, "decode_step_s": 0.001},
    }
    return Deployment.model_validate(
        {
            "disaggregation": "never",
            "pools": [{"name": "both", "role": "both", "engine": engine}],
            "gateway": {"batches": {**batches, "concurrency": 128}},
            "admission": {"spare_share": 1.0},
        }
    )


def row(number: int) -> str:
    body = {"model": "kvasir-tiny", "prompt": f"Line {number}", "max_tokens": 2}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})


def stored(spec: BatchesSpec, name: str) -> dict[str, str]:
    """The request that made the result of each line, by the line."""
    assert spec.storage is not None
    in_folder = LocalStorage(Path(spec.storage))
    storage = S3Storage.at(spec.storage, spec.s3) if spec.in_objects else in_folder
    journal = Journal(storage, f"default/journals/{name}")
    shown = [json.loads(bytes(result.shown)) for result in journal.results()]
    return {each["custom_id"]: each["id"] for each in shown}


async def test_ten_thousand_lines_have_one_result_each_though_the_router_is_killed_twice(
    tmp_path: Path, batches: dict[str, Any]
) -> None:
    spec, clock = deployment(batches), MonotonicClock()
    async with Fleet(tmp_path, spec, Layout({"both": 2}), clock=clock) as fleet:

        async def asked(method: str, path: str, **more: Any) -> Any:
            async with httpx.AsyncClient(base_url=f"http://{fleet.routers[-1].address}") as client:
                response = await client.request(method, path, **more)
                assert response.status_code == 200, response.text
                return response

        async def done(at_least: int) -> bool:
            batch = (await asked("GET", f"/v1/batches/{name}")).json()
            assert batch["status"] in ("validating", "in_progress", "finalizing", "completed"), batch
            return int(batch["request_counts"]["completed"]) >= at_least

        content = "\n".join(map(row, range(LINES))).encode()
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", content)}}
        file = (await asked("POST", "/v1/files", **form)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        name = (await asked("POST", "/v1/batches", json=body)).json()["id"]
        before: dict[str, str] = {}
        for lines in KILL_AT:
            await until(partial(done, lines), 120.0, f"{lines} lines", clock, 0.05)
            await fleet.routers[-1].process.kill()
            before |= await asyncio.to_thread(stored, spec.gateway.batches, name)
            assert lines <= len(before) < LINES
            await fleet.all_ready(await fleet.add_router())
        await until(partial(done, LINES), 120.0, "all lines", clock, 0.05)

        async def ended() -> bool:
            return bool((await asked("GET", f"/v1/batches/{name}")).json()["status"] == "completed")

        await until(ended, 60.0, "the end", clock, 0.05)
        batch = (await asked("GET", f"/v1/batches/{name}")).json()
        output = (await asked("GET", f"/v1/files/{batch['output_file_id']}/content")).text
        rows = [json.loads(line) for line in output.splitlines()]
        assert Counter(each["custom_id"] for each in rows) == {f"c{number}": 1 for number in range(LINES)}
        made = {each["custom_id"]: each["id"] for each in rows}
        assert {line: made[line] for line in before} == before
        assert batch["error_file_id"] is None
