"""Routes of the spec: what is accepted, and what each mistake is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.config.spec.deployment import Deployment

SPEC: dict[str, Any] = {
    "disaggregation": "never",
    "model": {"source": "kvasir-tiny", "served_name": "v1"},
    "pools": [
        {"name": "one", "role": "both"},
        {"name": "two", "role": "both", "model": "v2"},
        {"name": "vectors", "role": "embed", "model": "vectors"},
    ],
    "models": [{"name": "v2", "source": "kvasir-tiny"}, {"name": "vectors", "source": "kvasir-tiny-embed"}],
    "slo": [{"name": "default"}, {"name": "fast"}],
    "tenancy": {"tenants": [{"name": "acme", "models": ["chat"]}]},
}
CHAT: dict[str, Any] = {"name": "chat", "model": "v1"}


def deployment(*routes: dict[str, Any], **changes: Any) -> Deployment:
    return Deployment.model_validate({**SPEC, "routes": [CHAT, *routes], **changes})


def test_a_spec_with_everything_is_valid_and_views_keep_it() -> None:
    spec = deployment(
        {
            "name": "full",
            "model": "v1",
            "canary": {"model": "v2"},
            "fallbacks": ["chat", "v2"],
            "shadow": {"model": "v2"},
            "rules": [{"tenants": ["acme"], "headers": {"x-plan": "pro"}, "model": "v2", "slo": "fast"}],
        },
        {"name": "split", "arms": [{"model": "v1"}, {"model": "v2", "weight": 0}]},
        {"name": "alias", "model": "full"},
        {"name": "embed", "model": "vectors"},
    )
    assert Deployment.model_validate_json(spec.model_dump_json()) == spec
    assert [route.name for route in spec.views()[1].routes] == ["chat", "full", "split", "alias", "embed"]


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({"name": "a"}, "needs either model or arms, and not both"),
        ({"name": "a", "model": "v1", "arms": [{"model": "v2"}]}, "needs either model or arms"),
        ({"name": "chat", "model": "v1"}, "names must differ"),
        ({"name": "v2", "model": "v1"}, "'v2' is the name of a model or adapter too; rename the route"),
        ({"name": "a", "model": "v9"}, "a names unknown 'v9' in model; there are v1, v2, vectors, chat, a"),
        ({"name": "a", "model": "v1", "fallbacks": ["v9"]}, "unknown 'v9' in fallbacks"),
        ({"name": "a", "arms": [{"model": "chat"}]}, "unknown model 'chat' in arms; the models are v1, v2"),
        ({"name": "a", "model": "v1", "shadow": {"model": "v9"}}, "unknown model 'v9' in shadow"),
        ({"name": "a", "arms": [{"model": "v1", "weight": 0}]}, "the weights of a are all 0"),
        ({"name": "a", "arms": [{"model": "v1"}, {"model": "v1"}]}, "lists an arm twice"),
        ({"name": "a", "arms": [{"model": "v1", "weight": -1}]}, "greater than or equal to 0"),
        ({"name": "a", "model": "a"}, "a → a is a cycle"),
        ({"name": "a", "model": "v1", "fallbacks": ["a"]}, "a → a is a cycle"),
        ({"name": "a", "arms": [{"model": "v1"}], "canary": {"model": "v2"}}, "it needs model and not arms"),
        ({"name": "a", "model": "chat", "canary": {"model": "v2"}}, "'chat' is a route; name its model"),
        ({"name": "a", "model": "v1", "canary": {"model": "v1"}}, "the canary is the model 'v1' itself"),
        (
            {"name": "a", "model": "v1", "canary": {"model": "v2", "steps": [0.5, 0.5]}},
            "each must be larger than the one before",
        ),
        ({"name": "a", "model": "v1", "canary": {"model": "v2", "steps": [1.0]}}, "less than 1"),
        ({"name": "a", "model": "v1", "affinity": "cookie"}, "affinity 'cookie' of a is none of session"),
        ({"name": "a", "model": "v1", "affinity": "header:authorization"}, "the header has a secret"),
        ({"name": "a", "model": "v1", "rules": [{"tenants": ["acme"]}]}, "a rule sets nothing"),
        ({"name": "a", "model": "v1", "rules": [{"model": "v9"}]}, "unknown model 'v9' in rules"),
        ({"name": "a", "model": "v1", "rules": [{"slo": "slow"}]}, "unknown SLO class 'slow' in rules"),
        (
            {"name": "a", "model": "v1", "rules": [{"tenants": ["bob"], "slo": "fast"}]},
            "unknown tenant 'bob'",
        ),
        ({"name": "a", "model": "v1", "rules": [{"headers": {"X-Plan": "a"}, "slo": "fast"}]}, "lower case"),
        (
            {"name": "a", "model": "v1", "rules": [{"headers": {"cookie": "a"}, "slo": "fast"}]},
            "has a secret",
        ),
        (
            {
                "name": "a",
                "model": "v1",
                "rules": [{"min_prompt_chars": 9, "max_prompt_chars": 8, "slo": "fast"}],
            },
            "min_prompt_chars 9 exceeds max_prompt_chars 8",
        ),
        ({"name": "a", "model": "chat", "shadow": {"model": "v2"}}, "no rules and no shadow"),
        ({"name": "a", "arms": [{"model": "v1"}, {"model": "vectors"}]}, "vectors computes embeddings"),
    ],
)
def test_each_mistake_is_told_with_the_names(route: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        deployment(route)
    assert message in str(caught.value)


def test_a_cycle_over_several_routes_is_shown() -> None:
    with pytest.raises(ValidationError, match="a → b → c → a is a cycle; let one of them name a model"):
        deployment(
            {"name": "a", "model": "b"},
            {"name": "b", "model": "v1", "fallbacks": ["c"]},
            {"name": "c", "model": "a"},
        )


def test_a_canary_without_slo_classes_is_refused() -> None:
    spec = {key: value for key, value in SPEC.items() if key != "slo"}
    with pytest.raises(ValidationError, match="judged by SLO classes, and the spec lists none; add slo"):
        Deployment.model_validate({**spec, "routes": [{**CHAT, "canary": {"model": "v2"}}]})


def test_a_tenant_that_names_no_model_and_no_route_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown 'chat'"):
        Deployment.model_validate(SPEC)
