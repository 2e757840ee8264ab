"""Scores and classes by models that classify, in the formats that clients of vLLM, Jina and Cohere read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from kvasir.checkpoint.classes import Classes
from kvasir.config.spec.deployment import PoolSpec
from kvasir.core.requests import Role, token_ids
from kvasir_platform.gateway.prompt.pairs import Classifier, PairForm

FORM = PairForm(token_ids([1]), token_ids([6, 6]), token_ids([6]), first_type=1)
LONG = "b " * 9000
RERANKER = Classifier(Classes(("LABEL_0",), typed=True), pairs=FORM)
EMBED = {"disaggregation": "never", "pools": (PoolSpec(name="e", role=Role.EMBED),)}


@pytest_asyncio.fixture
async def edge(start: Any) -> Any:
    edge = await start(deployed=EMBED, classifier=RERANKER)
    scores = iter([0.1, 0.9, 0.5])
    edge.router.script = lambda stream: stream.embed((next(scores),))
    return edge


async def post(edge: Any, path: str, **body: Any) -> tuple[int, Any]:
    reply = await edge.post(path, json.dumps({"model": "kvasir-tiny", **body}).encode())
    return reply.status, json.loads(reply.body)


async def test_documents_are_ordered_by_the_output_for_each_pair(edge: Any) -> None:
    status, page = await post(edge, "/v1/rerank", query="q", documents=["a", "b", "c"], top_n=2)
    assert status == 200
    assert [(r["index"], round(r["relevance_score"], 6)) for r in page["results"]] == [(1, 0.9), (2, 0.5)]
    assert page["usage"]["total_tokens"] == sum(len(s.request.tokens) for s in edge.router.streams)


async def test_a_pair_is_one_input_with_the_place_where_token_types_change(edge: Any) -> None:
    await post(edge, "/v1/score", text_1=["first text", "other"], text_2=["second", "third one"])
    plain = [(await post(edge, "/tokenize", prompt=text, add_special_tokens=False))[1]["tokens"]
             for text in ("first text", "second", "other", "third one")]  # fmt: skip
    requests = [stream.request for stream in edge.router.streams]
    assert [list(each.tokens) for each in requests] == [
        [1, *plain[0], 6, 6, *plain[1], 6],
        [1, *plain[2], 6, 6, *plain[3], 6],
    ]
    assert [each.second_text_at for each in requests] == [2 + len(plain[0]), 2 + len(plain[2])]


async def test_a_pair_is_cut_to_the_tokens_that_are_asked_for(edge: Any) -> None:
    status, _ = await post(
        edge, "/v1/score", text_1="a", text_2="b c d e f g h i j k", truncate_prompt_tokens=8
    )
    assert status == 200
    assert len(edge.router.streams[0].request.tokens) == 8


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "unsupported_task", "model"),
        ("/v1/completions", {"prompt": "a"}, "unsupported_task", "model"),
        ("/v1/rerank", {"query": "q", "documents": ["a", LONG]}, "context_length_exceeded", "documents[1]"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5},
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        ("/v1/classify", {"input": ["a", ""]}, "invalid_value", "input[1]"),
        ("/v1/classify", {"input": "a", "use_activation": False}, "unsupported_parameter", "use_activation"),
    ],
)  # fmt: skip
async def test_what_a_cross_encoder_cannot_do_is_refused_by_name(
    edge: Any, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    status, page = await post(edge, path, **body)
    assert (status, page["error"]["code"], page["error"]["param"]) == (400, code, param)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes_have_names_and_probabilities(start: Any, path: str) -> None:
    edge = await start(deployed=EMBED, classifier=Classifier(Classes(("calm", "cross", "glad"))))
    edge.router.script = lambda stream: stream.embed((0.25, 0.125, 0.625))
    status, page = await post(edge, path, input=["one", "two"])
    assert (status, page["object"], len(page["data"])) == (200, "list", 2)
    assert page["data"][1] == {"index": 1, "label": "glad", "probs": [0.25, 0.125, 0.625], "num_classes": 3}
    status, page = await post(edge, "/v1/rerank", query="q", documents=["a"])
    assert (status, page["error"]["code"]) == (400, "unsupported_task")
    assert "/v1/classify" in page["error"]["message"]


async def test_an_embedding_model_has_no_classes(start: Any) -> None:
    edge = await start(deployed=EMBED)
    status, page = await post(edge, "/v1/classify", input="a")
    assert (status, page["error"]["code"], page["error"]["param"]) == (400, "unsupported_task", "model")


async def test_an_output_of_another_size_is_an_error_of_the_worker(edge: Any) -> None:
    edge.router.script = lambda stream: stream.embed((0.5, 0.5))
    status, page = await post(edge, "/v1/score", text_1="a", text_2="b")
    assert (status, page["error"]["code"]) == (502, "protocol_error")
