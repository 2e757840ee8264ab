"""Which model a route chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from kvasir.config.spec.routing import SloSpec
from kvasir.config.spec.traffic.routes import RouteSpec
from kvasir_platform.gateway.traffic.choice import RouteKey, RouteTable, primary_models

SLOS = [SloSpec(name="default"), SloSpec(name="fast", ttft_s=0.2)]


def table(*routes: dict[str, Any], shares: Mapping[str, float] | None = None) -> RouteTable:
    return RouteTable([RouteSpec.model_validate(each) for each in routes], SLOS, lambda: shares or {})


def key(
    session: str = "", request: str = "r", tenant: str = "acme", chars: int = 10, **headers: str
) -> RouteKey:
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return RouteKey(tenant, sent, session, request, lambda: chars)


def test_an_alias_answers_with_its_model_and_an_alias_of_it_too() -> None:
    routes = table({"name": "a", "model": "b"}, {"name": "b", "model": "v1", "fallbacks": ["v2"]})
    assert routes.choose("a", key()).chain == routes.choose("b", key()).chain == ("v1", "v2")
    assert "a" in routes
    assert "v1" not in routes


def test_a_split_follows_its_weights_and_a_session_stays() -> None:
    arms = [{"model": "v1", "weight": 3}, {"model": "v2", "weight": 1}, {"model": "v3", "weight": 0}]
    routes = table({"name": "chat", "arms": arms})
    seen = Counter(routes.choose("chat", key(request=f"r{n}")).chain[0] for n in range(4000))
    assert seen.keys() == {"v1", "v2"}
    assert seen["v2"] == pytest.approx(1000, abs=120)
    for session in map(str, range(20)):
        assert len({routes.choose("chat", key(session, f"r{n}")).chain[0] for n in range(5)}) == 1


def test_sessions_of_two_tenants_are_different_and_a_tenant_or_header_can_be_the_key() -> None:
    arms = [{"model": "v1"}, {"model": "v2"}]
    routes = table({"name": "chat", "arms": arms})
    chosen = [
        (
            routes.choose("chat", key(f"s{n}", tenant="a")).chain,
            routes.choose("chat", key(f"s{n}", tenant="b")).chain,
        )
        for n in range(40)
    ]
    assert any(one != other for one, other in chosen)
    by_tenant = table({"name": "chat", "arms": arms, "affinity": "tenant"})
    assert len({by_tenant.choose("chat", key(f"s{n}", f"r{n}")).chain for n in range(20)}) == 1
    by_header = table({"name": "chat", "arms": arms, "affinity": "header:x-user"})
    assert len({by_header.choose("chat", key(request=f"r{n}", x_user="bo")).chain for n in range(20)}) == 1
    assert len({by_header.choose("chat", key("same", f"r{n}")).chain for n in range(20)}) == 2


def test_as_a_canary_grows_sessions_move_to_it_and_none_moves_back() -> None:
    shares: dict[str, float] = {}
    spec = RouteSpec.model_validate({"name": "chat", "model": "v1", "canary": {"model": "v2"}})
    routes = RouteTable([spec], SLOS, lambda: shares)
    before: set[int] = set()
    for share in (0.0, 0.05, 0.25, 0.5, 1.0):
        shares["chat"] = share
        chains = {n: routes.choose("chat", key(f"s{n}")).chain for n in range(1000)}
        now = {n for n, chain in chains.items() if chain[0] == "v2"}
        assert before <= now
        assert len(now) == pytest.approx(1000 * share, abs=50)
        # A request of the canary that fails before its first token is answered by the model beside it.
        assert {chains[n] for n in now} <= {("v2", "v1")}
        before = now


def test_the_first_rule_that_matches_applies() -> None:
    rules = [
        {"tenants": ["acme"], "headers": {"x-plan": "pro"}, "model": "big", "slo": "fast"},
        {"min_prompt_chars": 1000, "model": "long", "policy": "least_loaded"},
        {"tenants": ["acme"], "slo": "fast"},
    ]
    routes = table({"name": "chat", "model": "v1", "rules": rules, "fallbacks": ["spare"]})
    pro = routes.choose("chat", key(x_plan="pro", chars=5000))
    assert (pro.chain, pro.slo and pro.slo.name, pro.policy) == (("big", "spare"), "fast", "")
    long = routes.choose("chat", key(x_plan="free", chars=1000))
    assert (long.chain, long.slo, long.policy) == (("long", "spare"), None, "least_loaded")
    assert routes.choose("chat", key(chars=999)).chain == ("v1", "spare")
    assert routes.choose("chat", key(chars=999)).slo is not None
    assert routes.choose("chat", key(tenant="other", chars=999)).slo is None


def test_prompts_are_measured_only_for_rules_that_ask() -> None:
    def measured() -> int:
        raise AssertionError("nothing asks for the length")

    routes = table({"name": "chat", "model": "v1", "rules": [{"tenants": ["acme"], "model": "v2"}]})
    assert routes.choose("chat", RouteKey("acme", {}, "", "r", measured)).chain == ("v2",)


def test_fallbacks_of_fallbacks_follow_and_none_is_tried_twice() -> None:
    routes = table(
        {"name": "a", "model": "v1", "fallbacks": ["b", "v3"]},
        {"name": "b", "model": "v2", "fallbacks": ["v1", "v4"]},
    )
    assert routes.choose("a", key()).chain == ("v1", "v2", "v4", "v3")


def test_routes_that_many_paths_lead_to_are_looked_at_once() -> None:
    names = [f"r{n}" for n in range(64)]
    routes = table(
        *(
            {"name": name, "model": name[1:], "fallbacks": names[n + 1 : n + 9]}
            for n, name in enumerate(names)
        )
    )
    assert routes.choose("r0", key()).chain == tuple(name[1:] for name in names)


def test_what_is_not_generated_uses_the_arm_with_the_largest_weight() -> None:
    arms = [{"model": "v1", "weight": 1}, {"model": "v2", "weight": 2}]
    routes = [{"name": "chat", "arms": arms}, {"name": "alias", "model": "chat"}]
    assert primary_models([RouteSpec.model_validate(each) for each in routes]) == {
        "chat": "v2",
        "alias": "v2",
    }
