"""What a model that classifies says about its classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.classes import Classes, classes_of
from kvasir.checkpoint.model_config import read_model_config
from kvasir.core.errors import ConfigError

BERT: dict[str, Any] = {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 2}


def classes(folder: Path, **config: Any) -> Classes | None:
    (folder / "config.json").write_text(json.dumps({**BERT, **config}))
    return classes_of(read_model_config(folder))


def test_labels_are_in_the_order_of_the_output(tmp_path: Path) -> None:
    names = {str(index): f"class {index}" for index in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    made = classes(tmp_path, id2label=names)
    assert made is not None
    assert made.labels == tuple(f"class {index}" for index in range(11))
    assert not made.scores


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Classes(("LABEL_0", "LABEL_1"), typed=True)),
        ({"id2label": {"0": "relevance"}}, Classes(("relevance",), typed=True)),
        ({"num_labels": 1, "type_vocab_size": 1}, Classes(("LABEL_0",))),
        ({"num_labels": 1, "use_sep_token": False}, Classes(("LABEL_0",), separated=False, typed=True)),
        (
            {
                "architectures": ["Qwen3ForSequenceClassification"],
                "type_vocab_size": None,
                "classifier_from_token": ["no", "yes"],
                "is_original_qwen3_reranker": True,
            },
            Classes(("LABEL_0",), separated=False),
        ),
        ({"architectures": ["BertModel"]}, None),
        ({"architectures": ["BertForTokenClassification"]}, None),
    ],
)
def test_pairs_and_classes_are_those_that_vllm_derives(
    tmp_path: Path, config: dict[str, Any], expected: Classes | None
) -> None:
    assert classes(tmp_path, **config) == expected


def test_labels_without_numbers_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: the keys of id2label"):
        classes(tmp_path, id2label={"calm": "0"})
