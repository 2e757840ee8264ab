"""Pods report their template, and the chart the desired one."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.pod_templates import (
    REVISION,
    PodRow,
    PodTemplate,
    follower_resource,
    pod_templates,
    pods_of,
    pool_resource,
    template_resource,
)

OLD = "0123456789ab"


def node(name: str, *resources: str, alive: bool = True) -> dict[str, Any]:
    """As Ray lists one."""
    told = {"node:10.0.0.1": 1.0, "memory": 1e9} | dict.fromkeys(resources, 1.0)
    return {"NodeID": name, "Alive": alive, "Resources": told}


def test_pods_of_pools_are_known_by_what_they_bring_and_the_dead_and_the_head_are_none() -> None:
    nodes = [
        node("head"),
        node("a", pool_resource("decode-2"), template_resource(OLD)),
        node("b", template_resource(OLD), follower_resource("decode-2")),
        node("c", pool_resource("prefill")),
        node("d", pool_resource("prefill"), alive=False),
    ]
    assert pods_of(nodes, {}) == [
        PodRow("a", "decode-2", OLD, free=False),
        PodRow("b", "decode-2", OLD, free=False),
        PodRow("c", "prefill", "", free=False),
    ]


def test_a_pod_says_which_revision_of_the_release_made_it() -> None:
    made = node("a", pool_resource("decode"), template_resource(OLD))
    made["Resources"][REVISION] = 12.0
    assert pods_of([made], {}) == [PodRow("a", "decode", OLD, free=False, revision=12)]


def test_what_is_reserved_for_an_engine_on_several_nodes_names_no_other_pool() -> None:
    own = (pool_resource("wide"), template_resource(OLD))
    group = [f"{each}_group_0_5c5f2d" for each in own] + [f"{each}_group_5c5f2d" for each in own]
    assert pods_of([node("a", *group, *own)], {}) == [PodRow("a", "wide", OLD, free=False)]


def test_a_pod_is_free_when_all_that_it_brings_for_its_pool_is_left() -> None:
    nodes = [node("a", pool_resource("decode")), node("b", follower_resource("decode"))]
    left = {"a": {pool_resource("decode"): 1.0}, "b": {pool_resource("decode"): 1.0, "memory": 1e9}}
    assert [pod.free for pod in pods_of(nodes, left)] == [True, False]


def test_what_the_chart_writes_is_understood() -> None:
    raw = b'{"decode": {"template": "0123456789ab", "pods": 3}}'
    assert pod_templates(raw) == {"decode": PodTemplate(OLD, 3)}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"decode": {"template": "0123456789ab"}}',
        b'{"decode": {"template": "../../etc", "pods": 3}}',
        b'{"decode": {"template": "0123456789ab", "pods": -1}}',
        b'{"decode": {"template": "0123456789ab", "pods": 1, "image": "x"}}',
    ],
)
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="not in the chart's format"):
        pod_templates(raw)
