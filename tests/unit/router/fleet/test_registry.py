"""Which workers may serve, and why others may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import WorkerIdentity
from kvasir.core.locality import Locality
from kvasir.core.membership import Endpoint
from kvasir.ports.router import HealthView
from kvasir_router.fleet.registry import CONNECTING, Registry

MakeIdentity = Callable[..., WorkerIdentity]


def registry(*workers: str) -> Registry:
    made = Registry(model="m", tokenizer_digest="t")
    for worker_id in workers:
        made.add(Endpoint(worker_id, f"{worker_id}:1", "pool"))
    return made


def test_a_worker_of_another_model_or_tokenizer_is_refused_with_both_sides(
    make_identity: MakeIdentity,
) -> None:
    known = registry("a")
    assert not known.register("a", make_identity("a", model="other", tokenizer_digest="x"))
    view = known["a"].view(None, 0)
    assert view.state == "refused"
    assert "model: other != m" in view.reason
    assert "tokenizer_digest: x != t" in view.reason


def test_a_worker_is_shown_with_the_health_that_it_is_given() -> None:
    known = registry("a")["a"]
    assert known.view(None, 0).health == HealthView()
    ejected = HealthView("ejected", "why", 2.0, 0.0, 1)
    assert known.view(None, 0, None, ejected).health == ejected


def test_a_worker_that_renders_a_golden_prompt_otherwise_is_refused_with_both_sides(
    make_identity: MakeIdentity,
) -> None:
    ours = GoldenPrompt("chat", "<user>hi", 3, 1)
    known = Registry(model="m", tokenizer_digest="t", golden=(ours,))
    for worker_id in ("same", "other"):
        known.add(Endpoint(worker_id, f"{worker_id}:1", "pool"))
    assert known.register("same", replace(make_identity("same"), golden=(ours,)))
    theirs = replace(ours, text="<user> hi", tokens=4, chain=2)
    assert not known.register("other", replace(make_identity("other"), golden=(theirs,)))
    assert known["other"].reason.startswith(
        "golden.chat: text from character 6 on: '<user> hi' != '<user>hi' (router), tokens: 4 != 3 (router)"
    )


def test_a_worker_whose_kv_differs_from_a_peers_is_refused_by_name(make_identity: MakeIdentity) -> None:
    known = registry("a", "b")
    assert known.register("a", make_identity("a"))
    assert not known.register("b", make_identity("b", dtype="fp8"))
    assert known["b"].reason == "kv.dtype: fp8 != f32 (both/a)"


def test_a_refused_worker_is_no_peer_and_one_that_has_gone_neither(make_identity: MakeIdentity) -> None:
    known = registry("a", "b", "c")
    known.register("a", make_identity("a"))
    known.register("b", make_identity("b", dtype="fp8"))
    assert known.register("c", make_identity("c"))
    for worker_id in ("a", "c"):
        known.note(worker_id, CONNECTING, "lost")
    ((refused, identity),) = known.refused()
    assert known.register(refused, identity)


def test_views_come_by_pool_and_id() -> None:
    known = registry("b", "a")
    known.add(Endpoint("z", "z:1", "first"))
    assert [entry.endpoint.worker_id for entry in known.all()] == ["z", "a", "b"]


def test_discovery_says_where_a_worker_is_if_the_worker_does_not(make_identity: MakeIdentity) -> None:
    known = registry()
    known.add(Endpoint("a", "a:1", "pool", Locality(node="n1", zone="z1")))
    known.add(Endpoint("b", "b:1", "pool"))
    silent = make_identity("a")
    assert known.located("a", silent).locality == Locality(node="n1", zone="z1")
    talkative = replace(silent, locality=Locality(zone="z2", rack="r2"))
    assert known.located("a", talkative).locality == Locality(node="n1", zone="z2", rack="r2")
    assert known.located("b", talkative) is talkative
