"""How two texts become one input: as the tokenizer itself encodes a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvasir.checkpoint.classes import Classes
from kvasir.core.requests import token_ids
from kvasir_platform.gateway.prompt.pairs import PairForm, classifier_of, kept_of_pair, pair_form, pair_texts

WORDS = ["[UNK]", "[CLS]", "[SEP]", "</s>", "a", "b", "c", "d"]
FORMS: dict[str, Any] = {
    "bert": processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 3), ("[CLS]", 1)),
    "template": processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    ),
    "none": None,
}


def tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if FORMS[kind] is not None:
        made.post_processor = FORMS[kind]
    return made


def form_of(kind: str, folder: Path, *, typed: bool) -> PairForm:
    tokenizer(kind).save(str(folder / "tokenizer.json"))
    return pair_form(folder / "tokenizer.json", typed=typed)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("texts", [("a b", "c"), ("a", "b c d"), ("d d d", "d")])
def test_a_pair_has_the_ids_and_types_of_the_tokenizer(
    kind: str, texts: tuple[str, str], tmp_path: Path
) -> None:
    encode = tokenizer(kind).encode
    whole = encode(*texts)
    first, second = (token_ids(encode(text, add_special_tokens=False).ids) for text in texts)
    ids, change = form_of(kind, tmp_path, typed=True).joined(first, second)
    assert list(ids) == whole.ids
    assert [int(change is not None and index >= change) for index in range(len(ids))] == whole.type_ids


def test_types_that_the_tokenizer_does_not_return_are_not_used(tmp_path: Path) -> None:
    tokenizer("bert").save(str(tmp_path / "tokenizer.json"))
    typed = Classes(("LABEL_0",), typed=True)
    for config, first_type in (
        ({"model_input_names": ["input_ids"]}, None),
        ({"model_input_names": ["input_ids", "token_type_ids"], "tokenizer_class": "Other"}, 1),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"tokenizer_class": "BertTokenizerFast"}, 1),
        ({}, 1),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        pairs = classifier_of(typed, tmp_path, None).pairs
        assert pairs is not None
        assert pairs.first_type == first_type


def test_a_model_without_token_types_gets_none(tmp_path: Path) -> None:
    form = form_of("bert", tmp_path, typed=False)
    assert form.joined(token_ids([4]), token_ids([5])) == (token_ids([1, 4, 2, 5, 2]), None)


def test_the_longer_text_is_cut_first_as_the_tokenizer_does() -> None:
    made = tokenizer("none")
    for room in range(2, 9):
        made.enable_truncation(room, strategy="longest_first")
        for first in range(1, 9):
            for second in range(1, 9):
                pair = made.encode(" ".join("a" * first), " ".join("b" * second))
                assert kept_of_pair(first, second, room) == (pair.tokens.count("a"), pair.tokens.count("b"))


def test_a_language_model_that_ranks_gets_one_text_for_each_pair(tmp_path: Path) -> None:
    texts = (["q"], ["one", "two"])
    plain = classifier_of(Classes(("LABEL_0",), separated=False), tmp_path, None)
    assert plain.pairs is None
    assert pair_texts(texts, plain.template, None) == ["qone", "qtwo"]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    shown = classifier_of(Classes(("LABEL_0",)), tmp_path, template)
    assert shown.pairs is None
    assert pair_texts(texts, shown.template, None) == ["<query>q<document>one", "<query>q<document>two"]
