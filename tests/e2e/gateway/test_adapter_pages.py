"""Operators load and unload adapters over HTTP, and clients see them as models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.core.errors import RequestError
from kvasir.ports.router import ServedAdapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = ServedAdapter("sql", "kvasir-tiny", "sql@0123")


def error_of(reply: Any) -> tuple[int, str, str | None]:
    error = json.loads(reply.body)["error"]
    return reply.status, error["code"], error["param"]


async def test_an_order_in_vllms_format_reaches_the_router_and_names_the_workers(edge: Any) -> None:
    reply = await edge.post(LOAD, b'{"lora_name": "sql", "lora_path": "/adapters/sql"}')
    assert reply.status == 200
    assert json.loads(reply.body) == {
        "message": "Success: LoRA adapter 'sql' added successfully.",
        "lora_name": "sql",
        "workers": ["prefill-1", "decode-1"],
    }
    body = {
        "lora_name": "b",
        "lora_path": "o/n",
        "model": "kvasir-tiny",
        "replicas": 2,
        "load_inplace": False,
    }
    assert (await edge.post(LOAD, json.dumps(body).encode())).status == 200
    reply = await edge.post(UNLOAD, b'{"lora_name": "sql"}')
    assert json.loads(reply.body)["message"] == "Success: LoRA adapter 'sql' removed successfully."
    assert edge.router.adapters.orders == [
        ("load", None, "sql", "/adapters/sql", "0"),
        ("load", "kvasir-tiny", "b", "o/n", "2"),
        ("unload", "sql"),
    ]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (LOAD, b"{", "invalid_json", None),
        (LOAD, b'{"lora_name": "a"}', "missing_parameter", "lora_path"),
        (LOAD, b'{"lora_name": "", "lora_path": "/a"}', "invalid_value", "lora_name"),
        (LOAD, b'{"lora_name": "a", "lora_path": 1}', "invalid_type", "lora_path"),
        (LOAD, b'{"lora_name": "a", "lora_path": "/a", "replicas": 0}', "invalid_value", "replicas"),
        (LOAD, b'{"lora_name": "a", "lora_path": "/a", "colour": 1}', "unknown_parameter", "colour"),
        (
            LOAD,
            b'{"lora_name": "a", "lora_path": "/a", "load_inplace": true}',
            "unsupported_parameter",
            "load_inplace",
        ),
        (UNLOAD, b"{}", "missing_parameter", "lora_name"),
    ],
)
async def test_a_bad_body_orders_nothing(edge: Any, path: str, body: bytes, code: str, param: str) -> None:
    assert error_of(await edge.post(path, body)) == (400, code, param)
    assert edge.router.adapters.orders == []


async def test_what_the_router_says_of_the_adapter_is_the_answer(edge: Any) -> None:
    edge.router.adapters.refusal = RequestError(
        "It is in use.", status=409, code="adapter_exists", param="lora_name"
    )
    reply = await edge.post(LOAD, b'{"lora_name": "sql", "lora_path": "/adapters/sql"}')
    assert error_of(reply) == (409, "adapter_exists", "lora_name")
    assert reply.headers["x-should-retry"] == "false"


async def test_only_operators_load_adapters(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [f"{hashlib.sha256(key.encode()).hexdigest()} tenant={key}" for key in ("plain", "ops")]
    keys.write_text("\n".join(lines) + "\n")
    tenants = (TenantSpec(name="plain"), TenantSpec(name="ops", operator=True))
    edge = await start(api_keys_file=str(keys), deployed={"tenancy": TenancySpec(tenants=tenants)})
    body = b'{"lora_name": "sql", "lora_path": "/adapters/sql"}'
    for path in (LOAD, UNLOAD):
        reply = await edge.post(path, body, "Authorization: Bearer plain\r\n")
        assert error_of(reply)[:2] == (403, "operator_only")
        assert (await edge.post(path, body)).status == 401
    assert edge.router.adapters.orders == []
    assert (await edge.post(LOAD, body, "Authorization: Bearer ops\r\n")).status == 200


async def test_a_loaded_adapter_is_a_model_for_as_long_as_it_is_served(edge: Any) -> None:
    client = await edge.client()
    edge.router.script = ScriptedStream.finish
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="sql", prompt="a")
    edge.router.adapters.loaded["sql"] = SQL
    assert [model.id async for model in client.models.list()] == ["kvasir-tiny", "pirate", "sql"]
    shown = (await client.models.retrieve("sql")).model_dump()
    assert (shown["parent"], shown["root"]) == ("kvasir-tiny", "sql")
    answer = await client.completions.create(model="sql", prompt="a")
    assert answer.model == "sql"
    (stream,) = edge.router.streams
    assert (stream.request.model, stream.request.adapter) == ("kvasir-tiny", "sql@0123")
    assert json.loads((await edge.get("/status")).body)["models"] == ["kvasir-tiny", "pirate", "sql"]
    del edge.router.adapters.loaded["sql"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("sql")


async def test_an_adapter_of_the_spec_is_not_replaced_by_a_loaded_one(edge: Any) -> None:
    edge.router.adapters.loaded["pirate"] = ServedAdapter("pirate", "kvasir-tiny", "pirate@0123")
    edge.router.script = ScriptedStream.finish
    client = await edge.client()
    await client.completions.create(model="pirate", prompt="a")
    assert edge.router.streams[0].request.adapter == "pirate"
    assert [model.id async for model in client.models.list()] == ["kvasir-tiny", "pirate"]
