"""Several models behind one gateway through `kvasir up`: two that generate, and one for embeddings, with real
vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow


@pytest.fixture
def client(models: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{models.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def cosine(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def test_every_model_is_listed_and_ready_and_has_its_own_workers(
    models: Stack, client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list().data] == ["kvasir-tiny", "second", "vectors"]
    status = httpx.get(f"{models.url}/status", timeout=10).json()
    assert {name: each["ready"] for name, each in status["readiness"].items()} == {
        "kvasir-tiny": True,
        "second": True,
        "vectors": True,
    }
    assert {worker["pool"]: worker["role"] for worker in status["workers"]} == {
        "prefill": "prefill",
        "decode": "decode",
        "second": "both",
        "vectors": "embed",
    }
    assert {worker["state"] for worker in status["workers"]} == {"ready"}


def test_each_model_answers_under_its_name(models: Stack, client: openai.OpenAI) -> None:
    for name in ("kvasir-tiny", "second"):
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
        )
        assert answer.model == name
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        streamed = client.completions.create(model=name, prompt="Hello", max_tokens=4, stream=True)
        assert sum(len(chunk.choices) for chunk in streamed) >= 4
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="third", prompt="Hello")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="vectors", prompt="Hello")


def test_embeddings_are_equal_alone_in_a_batch_and_as_tokens(models: Stack, client: openai.OpenAI) -> None:
    texts = [f"Sentence number {number} about {'rivers' * (number % 5)}." for number in range(100)]
    whole = client.embeddings.create(model="vectors", input=texts)
    assert [each.index for each in whole.data] == list(range(100))
    vectors = [each.embedding for each in whole.data]
    assert {len(vector) for vector in vectors} == {256}
    tokens = [
        httpx.post(f"{models.url}/tokenize", json={"model": "vectors", "prompt": text}).json()["tokens"]
        for text in texts[:3]
    ]
    assert whole.usage.prompt_tokens > sum(map(len, tokens))
    by_tokens = client.embeddings.create(model="vectors", input=tokens, encoding_format="float")
    for number in range(3):
        alone = client.embeddings.create(model="vectors", input=texts[number]).data[0].embedding
        assert cosine(alone, alone) == pytest.approx(1.0, abs=1e-4)
        assert cosine(alone, vectors[number]) == pytest.approx(1.0, abs=1e-4)
        assert cosine(alone, by_tokens.data[number].embedding) == pytest.approx(1.0, abs=1e-4)
    assert cosine(vectors[0], vectors[1]) < 0.9999
    shorter = client.embeddings.create(model="vectors", input=texts[0], dimensions=64).data[0].embedding
    norm = math.sqrt(cosine(vectors[0][:64], vectors[0][:64]))
    assert shorter == pytest.approx([value / norm for value in vectors[0][:64]], abs=1e-3)


def test_what_was_embedded_is_counted_and_nothing_is_left(models: Stack, client: openai.OpenAI) -> None:
    client.embeddings.create(model="vectors", input=["one", "two"])
    shown = httpx.get(f"{models.url}/metrics", timeout=10).text
    counted = [
        line for line in shown.splitlines() if line.startswith('kvasir_requests_total{model="vectors"')
    ]
    assert any('outcome="ok"' in line and float(line.rsplit(" ", 1)[1]) >= 2 for line in counted)
    models.wait_until(models.idle, 10.0, "idle workers")
    status = httpx.get(f"{models.url}/status", timeout=10).json()
    assert status["in_flight"] == 0


def test_a_drained_embedding_worker_takes_nothing_new(models: Stack, client: openai.OpenAI) -> None:
    (worker,) = [each["worker_id"] for each in models.workers() if each["pool"] == "vectors"]
    told = models.kvasir("drain", worker)
    assert told.returncode == 0, told.stderr
    status = httpx.get(f"{models.url}/status", timeout=10).json()
    assert status["readiness"]["vectors"] == {"ready": False, "reason": "no worker that embeds"}
    assert status["readiness"]["second"]["ready"]
    assert models.kvasir("drain", worker, "--undo").returncode == 0
    assert len(client.embeddings.create(model="vectors", input="back again").data) == 1
