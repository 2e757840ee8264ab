"""Scores and classes of a served model beside those that transformers computes with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from tests.kit.models.architectures import TinyModel

from load_tests.scenarios.models.results import Cell

_QUERY = "Which ship sails over the blue sea?"
_DOCUMENTS = (
    "The ship sails over a blue sea to an old town.",
    "A town.",
    "And back home to the sea and to the old town, over and over again, until the ship is home.",
    "Nothing that anybody asked for, at some length, so that the pairs of one step differ in theirs.",
)
_APART = 1e-4
"""How far probabilities in 32 bits may be apart: kernels add in other orders."""


def classifies(client: httpx.Client, model: TinyModel, folder: Path) -> Cell:
    """Compare the model that `client` reaches with transformers."""
    name = client.get("/v1/models").json()["data"][0]["id"]
    one = model.values.get("num_labels") == 1
    if one:
        body = {"model": name, "text_1": _QUERY, "text_2": list(_DOCUMENTS)}
        answer = client.post("/v1/score", json=body)
    else:
        answer = client.post("/v1/classify", json={"model": name, "input": list(_DOCUMENTS)})
    if answer.status_code != httpx.codes.OK:
        return Cell("no", f"{answer.status_code}: {answer.text[:300]}")
    data = answer.json()["data"]
    ours = [[each["score"]] if one else each["probs"] for each in data]
    theirs = _of_transformers(folder, model, pairs=one)
    apart = max(abs(a - b) for a, b in zip(chain(*ours), chain(*theirs), strict=True))
    what = f"{len(ours)} scores of pairs" if one else f"{len(ours)} inputs of {len(ours[0])} classes"
    return Cell("yes" if apart <= _APART else "no", f"{what}, within {apart:.1g} of transformers'")


def _of_transformers(folder: Path, model: TinyModel, *, pairs: bool) -> list[list[float]]:
    import torch
    import transformers

    load = getattr(transformers, model.architecture).from_pretrained
    made = load(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for document in _DOCUMENTS:
        texts: Sequence[str] = (document,)
        if pairs:
            separated = model.values.get("use_sep_token", True)
            texts = (_QUERY, document) if separated else (_QUERY + document,)
        inputs: Any = tokenizer(*texts, return_tensors="pt")
        if "token_type_ids" in inputs and "type_vocab_size" not in made.config.to_dict():
            del inputs["token_type_ids"]
        with torch.inference_mode():
            logits = made(**inputs).logits[0]
        found.append((logits.sigmoid() if pairs else logits.softmax(-1)).tolist())
    return found
