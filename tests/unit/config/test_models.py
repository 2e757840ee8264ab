"""Several models in one file, each also as the only one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import loads
from kvasir.config.load.model_files import Matryoshka, matryoshka
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.deployment import Deployment, TiersSpec
from kvasir.core.errors import ConfigError

SEVERAL = """
model: {source: kvasir-tiny, served_name: main}
lora: [{name: pirate, path: /adapters/pirate}]
models:
  - {name: org/Small-1B, max_model_len: 512, disaggregation: never, lora: [{name: parrot, path: /adapters/p}]}
  - {name: vectors, source: org/embedder}
tiers: {cpu: {bytes: 1048576}}
pools:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode, model: main}
  - {name: small, role: both, model: org/Small-1B, engine: {block_size: 64}}
  - {name: vectors, role: embed, model: vectors, replicas: 3}
"""


def test_each_model_is_seen_as_if_it_were_the_only_one() -> None:
    main, small, vectors = loads(SEVERAL, "t.yaml").views()
    assert [view.model.name for view in (main, small, vectors)] == ["main", "org/Small-1B", "vectors"]
    assert [[pool.name for pool in view.pools] for view in (main, small, vectors)] == [
        ["prefill", "decode"],
        ["small"],
        ["vectors"],
    ]
    assert [view.disaggregation for view in (main, small, vectors)] == ["always", "never", "never"]
    assert [lora.name for lora in main.lora + small.lora] == ["pirate", "parrot"]
    assert (small.model.max_model_len, small.model.source) == (512, "kvasir-tiny")
    assert (main.embeds, small.embeds, vectors.embeds) == (False, False, True)
    assert main.tiers == small.tiers != TiersSpec()
    assert vectors.tiers == TiersSpec()
    assert not vectors.moves_kv


def test_a_view_is_a_deployment_that_stands_by_itself() -> None:
    for view in loads(SEVERAL, "t.yaml").views():
        assert Deployment.model_validate_json(view.model_dump_json()) == view
        assert view.views() == (view,)


def test_all_that_models_share_is_in_every_view() -> None:
    spec = loads(SEVERAL, "t.yaml", ["gateway.port=81", "worker.drain_s=3"])
    assert {(view.gateway.port, view.worker.drain_s) for view in spec.views()} == {(81, 3.0)}


def test_a_file_with_one_model_is_its_own_view() -> None:
    deployment = Deployment()
    assert deployment.views() == (deployment,)
    assert deployment.views()[0] is deployment
    assert deployment.view_of("decode") is deployment
    assert deployment.served_names() == ["kvasir-tiny"]


def test_a_deployment_may_make_embeddings_only() -> None:
    spec = loads("pools: [{name: vectors, role: embed}]", "t.yaml")
    (view,) = spec.views()
    assert spec.embeds
    assert (view.disaggregation, view.moves_kv, spec.hands_kv_over) == ("never", False, False)


def test_pools_find_their_model_and_clients_their_names() -> None:
    spec = loads(SEVERAL, "t.yaml")
    assert spec.view_of("small").model.name == "org/Small-1B"
    assert spec.served_names() == ["main", "pirate", "org/Small-1B", "parrot", "vectors"]
    assert spec.hands_kv_over
    with pytest.raises(KeyError):
        spec.view_of("nobody")


def test_a_models_fields_can_be_set_by_its_name() -> None:
    spec = loads(SEVERAL, "t.yaml", ["models.vectors.max_model_len=64", "pools.vectors.replicas=5"])
    assert spec.views()[2].model.max_model_len == 64
    assert spec.pool("vectors").replicas == 5


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ("pools.small.model=nobody", "pools", "small serves unknown model 'nobody'; the models are main, "),
        ("pools.small.role=embed", None, None),
        ("pools.decode.role=embed", "pools", "main has pools of role embed and of other roles"),
        (
            "pools.small.role=prefill",
            "models",
            "org/Small-1B: disaggregation: never needs a pool of role both",
        ),
        ("pools.small.model=main", "models", "no pool serves org/Small-1B; add one with that model"),
        ("models.vectors.name=main", "models", "names must differ"),
        ("lora.pirate.name=parrot", "lora", "names must differ, found ['parrot', 'parrot']"),
        ("lora.pirate.name=vectors", "lora", "'vectors' is also the served name"),
        ("models.vectors.name='a b'", "models[1].name", "text that matches"),
        ("models.vectors.lora=[{name: main, path: /x}]", "lora", "'main' is also the served name"),
        ("disaggregation=never", "disaggregation", "never needs a pool of role both"),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(change: str, field: str | None, told: str | None) -> None:
    if field is None or told is None:
        assert loads(SEVERAL, "t.yaml", [change]).view_of("small").embeds
        return
    with pytest.raises(SpecError) as caught:
        loads(SEVERAL, "t.yaml", [change])
    (problem,) = caught.value.problems
    assert problem.field == field
    assert told in problem.expected


def test_pools_of_different_models_need_not_exchange_kv() -> None:
    spec = loads(SEVERAL, "t.yaml")
    assert {pool.engine.block_size for pool in spec.pools} == {32, 64}


def test_an_engine_that_embeds_is_judged_by_its_own_model() -> None:
    changes = ["pools.vectors.engine.speculative={}", "model.max_model_len=100000"]
    assert unsupported_features(loads(SEVERAL, "t.yaml", changes), platform="cpu") == [
        "pools.vectors.engine.speculative: an embed pool generates nothing to speculate on; remove it"
    ]
    changes = ["pools.small.engine.chunked_prefill=false", "pools.small.engine.max_num_batched_tokens=256"]
    (told,) = unsupported_features(loads(SEVERAL, "t.yaml", changes), platform="cpu")
    assert "is less than model.max_model_len 512" in told


@pytest.mark.parametrize(
    ("config", "trained", "expected"),
    [
        ({}, None, None),
        ({"is_matryoshka": True}, None, Matryoshka()),
        ({"matryoshka_dimensions": [64, 128]}, None, Matryoshka((64, 128))),
        ({}, True, Matryoshka()),
        ({"is_matryoshka": True}, False, None),
    ],
)
def test_whether_embeddings_may_be_cut_is_read_from_the_model_unless_the_spec_says(
    tmp_path: Path, config: dict[str, Any], trained: bool | None, expected: Matryoshka | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert matryoshka(tmp_path, trained) == expected


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        matryoshka(tmp_path)
