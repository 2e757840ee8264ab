"""An adapter that is loaded and unloaded while real vLLM serves, with separate prefill and decode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from tests.kit.engines.vllm_reference import Reference
from tests.kit.gateway.completions import of_vllm, put_together
from tests.kit.gateway.sampling_cases import GREEDY, HELLO
from tests.kit.stack import ADAPTER

from kvasir_workers.adapters.files import CONFIG_FILE

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow

MODEL = "kvasir-tiny"
NAME = "buccaneer"
PROMPT = [*(8 + at % 200 for at in range(300)), *HELLO]


@pytest.fixture
def expected(alone: Reference) -> tuple[Any, Any]:
    """What vLLM alone says with the adapter, and without it."""
    return _said(alone, adapted=True), _said(alone, adapted=False)


def _said(alone: Reference, *, adapted: bool) -> Any:
    return of_vllm(alone.generate(PROMPT, **GREEDY, adapted=adapted))


def _stream(stack: Stack, model: str) -> Any:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        options: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "stream": True}
        return put_together(list(client.completions.create(model=model, prompt=PROMPT, **GREEDY, **options)))


def _order(stack: Stack, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def test_an_adapter_is_loaded_served_and_unloaded_while_it_serves(stack: Stack, expected: Any) -> None:
    adapted, plain = expected
    assert adapted != plain
    elsewhere = _order(stack, "load", lora_name=NAME, lora_path="/somewhere/else")
    assert elsewhere.json()["error"]["code"] == "adapter_source_not_allowed"
    not_there = _order(stack, "load", lora_name=NAME, lora_path=str(ADAPTER.with_name("nothing")))
    assert not_there.json()["error"]["code"] == "adapter_unreadable"

    loaded = _order(stack, "load", lora_name=NAME, lora_path=str(ADAPTER))
    assert loaded.status_code == 200, loaded.text
    assert sorted(name.split("-")[0] for name in loaded.json()["workers"]) == ["decode", "prefill"]
    shown = httpx.get(f"{stack.url}/v1/models/{NAME}", timeout=10).json()
    assert (shown["parent"], shown["root"]) == (MODEL, NAME)
    moved = stack.metric("kvasir_transferred_bytes_total")
    assert _stream(stack, NAME) == adapted
    assert stack.metric("kvasir_transferred_bytes_total") > moved
    assert _stream(stack, MODEL) == plain

    taken = _order(stack, "load", lora_name=NAME, lora_path=str(ADAPTER))
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "adapter_exists")
    (listed,) = json.loads(stack.kvasir("lora", "list", "-o", "json").stdout)
    assert (listed["name"], listed["rank"], len(listed["workers"])) == (NAME, 8, 2)

    unloaded = stack.kvasir("lora", "unload", NAME)
    assert unloaded.returncode == 0, unloaded.stderr
    with pytest.raises(openai.NotFoundError, match=NAME):
        _stream(stack, NAME)
    assert NAME not in httpx.get(f"{stack.url}/v1/models", timeout=10).text
    assert _order(stack, "unload", lora_name=NAME).json()["error"]["code"] == "adapter_not_found"


def test_what_only_the_engine_does_not_support_is_refused_in_its_words_and_it_serves_on(
    stack: Stack, adapters: Path, expected: Any
) -> None:
    folder = shutil.copytree(ADAPTER, adapters / "dora")
    config = folder / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    refused = _order(stack, "load", lora_name="dora", lora_path=str(folder))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "adapter_refused")
    assert "vLLM does not yet support DoRA" in error["message"]
    assert _stream(stack, MODEL) == expected[1]
