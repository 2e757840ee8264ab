"""Tenants in kvasir.yaml: valid settings, defaults, and errors."""

from __future__ import annotations

import re

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.tenants import TenantSpec


def load(tenancy: str, more: str = "") -> Deployment:
    return loads(f"tenancy: {tenancy}\n{more}", "kvasir.yaml")


def test_without_a_word_there_is_one_tenant_without_limits_who_may_do_everything() -> None:
    [tenant] = Deployment().tenancy.all_tenants()
    assert tenant == TenantSpec(name="default", operator=True)
    assert Deployment().tenancy.weights() == {"default": 1.0}


def test_listed_tenants_are_no_operators_and_the_default_one_is_implied_beside_them() -> None:
    tenancy = load("{tenants: [{name: a, weight: 2}, {name: b}]}").tenancy
    assert [(each.name, each.operator) for each in tenancy.all_tenants()] == [
        ("a", False), ("b", False), ("default", True),
    ]  # fmt: skip
    assert tenancy.weights() == {"a": 2.0, "b": 1.0, "default": 1.0}


def test_the_default_tenant_may_be_listed() -> None:
    tenancy = load("{tenants: [{name: default, concurrency: 3}]}").tenancy
    assert [(each.concurrency, each.operator) for each in tenancy.all_tenants()] == [(3, False)]


def test_the_implied_tenant_has_a_class_of_the_spec() -> None:
    tenancy = load("{priorities: [gold, silver]}").tenancy
    assert [each.priority for each in tenancy.all_tenants()] == ["gold"]


@pytest.mark.parametrize(
    ("tenancy", "reason"),
    [
        ("{tenants: [{name: a}, {name: a}]}", "tenants: names must differ"),
        ("{priorities: [a, a]}", "priorities: names must differ"),
        (
            "{tenants: [{name: a, priority: urgent}]}",
            "a has unknown priority 'urgent'; the classes are interactive",
        ),
        ("{tenants: [{name: a, cache: shared}]}", "neither `own` nor `shared:GROUP`"),
        ("{tenants: [{name: a, cache: 'shared:A b'}]}", "neither `own` nor `shared:GROUP`"),
        ("{tenants: [{name: a, models: [kvasir-tiny, other]}]}", "a names unknown 'other' in models"),
        ("{tenants: [{name: a, slo: [fast]}]}", "a names unknown 'fast' in slo"),
        ("{tenants: [{name: a, models: []}]}", "at least 1"),
        ("{tenants: [{name: a, requests_per_min: 0}]}", "1"),
        ("{redis: {url: 'redis://user:secret@host'}}", "without credentials"),
        ("{shared_prefixes: [{name: a}]}", "needs text or sha256"),
        (f"{{shared_prefixes: [{{name: a, text: x, sha256: {'a' * 64}}}]}}", "needs text or sha256"),
        ("{shared_prefixes: [{name: a, sha256: 00}]}", "sha256"),
        ("{shared_prefixes: [{name: a, text: x}, {name: a, text: y}]}", "shared_prefixes: names must differ"),
        ("{shared_prefixes: [{name: a, text: x, tenants: [b]}]}", "a names unknown tenant 'b'"),
        ("{redis: {url: 'redis://host', ca_file: x}}", "the url does not use TLS"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(tenancy: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason.replace("(", r"\(")):
        load(tenancy)


def test_adapters_and_slo_classes_of_the_spec_can_be_allowed() -> None:
    deployment = load(
        "{tenants: [{name: a, models: [tuned, kvasir-tiny], slo: [fast]}]}",
        "lora: [{name: tuned, path: x}]\nslo: [{name: slow}, {name: fast}]",
    )
    assert deployment.tenancy.tenants[0].models == ("tuned", "kvasir-tiny")


@pytest.mark.parametrize("source", ["api_keys_file: x", "api_keys_dir: x", "api_keys_env: X"])
def test_any_source_of_keys_lets_the_gateway_face_the_network(source: str) -> None:
    gateway = loads(f"gateway: {{host: 0.0.0.0, {source}}}", "kvasir.yaml").gateway
    assert gateway.authenticates


ISSUER = "issuer: https://login.example.com, audience: [kvasir]"


@pytest.mark.parametrize(
    ("issuers", "reason"),
    [
        ("[{issuer: https://login.example.com}]", "audience"),
        (f"[{{{ISSUER}, algorithms: [HS256]}}]", "algorithms"),
        (f"[{{{ISSUER}, algorithms: [none]}}]", "algorithms"),
        ("[{issuer: 'http://login.example.com', audience: [k]}]", "read over HTTPS; use https://"),
        ("[{issuer: 'https://login.internal', audience: [k]}]", "set private_address: true"),
        ("[{issuer: 'https://169.254.169.254', audience: [k], private_address: true}]", "metadata service"),
        ("[{issuer: 'https://login.example.com/?a=b', audience: [k]}]", "no query"),
        (f"[{{{ISSUER}, jwks_url: 'https://127.0.0.1/keys'}}]", "jwks_url"),
        (f"[{{{ISSUER}, tenants: {{staff: nobody}}}}]", "maps to unknown tenant 'nobody'"),
        (f"[{{{ISSUER}, default_tenant: nobody}}]", "maps to unknown tenant 'nobody'"),
        (f"[{{{ISSUER}, default_scopes: [all]}}]", "inference"),
        (f"[{{{ISSUER}}}, {{{ISSUER}}}]", "issuers must differ"),
    ],
)
def test_issuers_that_cannot_be_trusted_or_mapped_are_refused(issuers: str, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)):
        loads(f"gateway: {{token_issuers: {issuers}}}", "kvasir.yaml")


def test_keys_in_redis_need_a_redis() -> None:
    with pytest.raises(SpecError, match=r"set tenancy\.redis"):
        loads("gateway: {api_keys_redis: true}", "kvasir.yaml")
    redis = "tenancy: {redis: {url: 'redis://10.0.0.1'}}"
    assert loads(f"gateway: {{api_keys_redis: true}}\n{redis}", "kvasir.yaml").gateway.authenticates


def test_an_issuer_of_tokens_lets_the_gateway_face_the_network() -> None:
    gateway = loads(f"gateway: {{host: 0.0.0.0, token_issuers: [{{{ISSUER}}}]}}", "kvasir.yaml").gateway
    assert gateway.authenticates
    assert gateway.token_issuers[0].algorithms == ("RS256", "ES256")
