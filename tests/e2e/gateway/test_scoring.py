"""Reranking and scores by an embedding model, in the formats that clients of Jina, Cohere and vLLM read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from kvasir.config.spec.deployment import PoolSpec
from kvasir.core.requests import Role


@pytest_asyncio.fixture
async def edge(start: Any) -> Any:
    edge = await start(deployed={"disaggregation": "never", "pools": (PoolSpec(name="e", role=Role.EMBED),)})
    edge.router.script = lambda stream: stream.embed((1.0, 0.0))
    return edge


async def post(edge: Any, path: str, **body: Any) -> tuple[int, Any]:
    reply = await edge.post(path, json.dumps({"model": "kvasir-tiny", **body}).encode())
    return reply.status, json.loads(reply.body)


def texts(edge: Any) -> list[int]:
    return [len(stream.request.tokens) for stream in edge.router.streams]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ordered_by_the_cosine_of_their_vectors(edge: Any, path: str) -> None:
    vectors = iter([(1.0, 0.0), (0.0, 3.0), (2.0, 0.0), (0.6, 0.8)])
    edge.router.script = lambda stream: stream.embed(next(vectors))
    status, page = await post(edge, path, query="q", documents=["a", {"text": "b"}, "c"])
    assert status == 200
    assert [(r["index"], round(r["relevance_score"], 6)) for r in page["results"]] == [
        (1, 1.0),
        (2, 0.6),
        (0, 0.0),
    ]
    assert [r["document"]["text"] for r in page["results"]] == ["b", "c", "a"]
    assert page["usage"]["total_tokens"] == sum(texts(edge))
    assert len(edge.router.streams) == 4


async def test_only_the_first_documents_are_returned_and_without_their_text(edge: Any) -> None:
    status, page = await post(
        edge, "/v1/rerank", query="q", documents=["a", "b", "c"], top_n=2, return_documents=False
    )
    assert status == 200
    assert len(page["results"]) == 2
    assert all(set(result) == {"index", "relevance_score"} for result in page["results"])


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_one_text_is_scored_against_each(edge: Any, names: tuple[str, str]) -> None:
    vectors = iter([(1.0, 0.0), (0.0, 3.0), (2.0, 0.0)])
    edge.router.script = lambda stream: stream.embed(next(vectors))
    status, page = await post(edge, "/v1/score", **{names[0]: "q", names[1]: ["a", "b"]})
    assert (status, page["object"]) == (200, "list")
    assert [(each["index"], each["object"], each["score"]) for each in page["data"]] == [
        (0, "score", 0.0),
        (1, "score", 1.0),
    ]


async def test_two_lists_are_scored_in_pairs(edge: Any) -> None:
    vectors = iter([(1.0, 0.0), (0.0, 1.0), (3.0, 0.0), (0.6, 0.8)])
    edge.router.script = lambda stream: stream.embed(next(vectors))
    _, page = await post(edge, "/score", text_1=["a", "b"], text_2=["c", "d"])
    assert [round(each["score"], 6) for each in page["data"]] == [1.0, 0.8]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/rerank", {"query": "q"}, "missing_parameter", "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "invalid_value", "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "invalid_value", "query"),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["a"], "instruction": "x"},
            "unsupported_parameter",
            "instruction",
        ),
        ("/v1/score", {}, "missing_parameter", "text_1"),
        ("/v1/score", {"text_1": "a", "items": "b"}, "invalid_value", "items"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "invalid_value", "text_1"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c " * 9000]}, "context_length_exceeded", "text_2[1]"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(
    edge: Any, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    status, page = await post(edge, path, **body)
    assert (status, page["error"]["code"], page["error"]["param"]) == (400, code, param)


async def test_a_model_that_generates_is_refused(start: Any) -> None:
    edge = await start()
    status, page = await post(edge, "/v1/rerank", query="q", documents=["a"])
    assert (status, page["error"]["code"]) == (400, "unsupported_task")


async def test_token_ids_are_counted_under_v1_as_without(edge: Any) -> None:
    for prefix in ("", "/v1"):
        status, page = await post(edge, f"{prefix}/tokenize", prompt="Hello there")
        assert status == 200
        _, text = await post(edge, f"{prefix}/detokenize", tokens=page["tokens"])
        assert "Hello there" in text["prompt"]
