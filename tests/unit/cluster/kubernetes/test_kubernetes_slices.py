"""Workers derived from EndpointSlices depend on the slices only, not on the order of events."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.cluster.slices import Pod, endpoint_slice, slice_of_service

from kvasir.core.errors import ProtocolError
from kvasir.core.locality import NOWHERE, Locality
from kvasir.core.membership import Endpoint
from kvasir_platform.cluster.kubernetes.api import Event, Listing
from kvasir_platform.cluster.kubernetes.reflector import Copy
from kvasir_platform.cluster.kubernetes.slices import Family, read_slice, workers


def found(*slices: dict[str, Any], family: Family = "ipv4") -> set[Endpoint]:
    return set(workers([read_slice(json.dumps(each).encode(), "session") for each in slices], family))


def test_a_pod_is_a_worker_at_its_address_and_the_named_port() -> None:
    one = endpoint_slice("decode", [Pod("d-0", "10.0.0.1")], port=7001)
    one["ports"].insert(0, {"name": "health", "port": 9, "protocol": "TCP"})
    assert found(one) == {Endpoint("d-0@10.0.0.1:7001", "10.0.0.1:7001", "decode")}


def test_of_an_engine_on_several_nodes_only_the_pod_that_serves_its_sessions_is_a_worker() -> None:
    own = {"kvasir.dev/deployment": "kvasir", "kvasir.dev/pool": "decode"}
    service = {
        "metadata": {"name": "kvasir-decode", "labels": {**own, "app.kubernetes.io/part-of": "kvasir"}},
        "spec": {
            "clusterIP": "None",
            "selector": {**own, "kvasir.dev/rank": "0"},
            "ports": [{"name": "session", "port": 7000, "targetPort": "grpc"}],
        },
    }
    pods = [
        Pod(f"d-{engine}-{rank}", f"10.0.{engine}.{rank}", labels={**own, "kvasir.dev/rank": str(rank)},
            ports={"grpc": 7001})
        for engine in (1, 2) for rank in (0, 1, 2)
    ]  # fmt: skip
    others = [Pod("p", "10.0.9.9", labels={**own, "kvasir.dev/pool": "prefill", "kvasir.dev/rank": "0"})]
    members = found(slice_of_service(service, [*pods, *others]))
    assert members == {
        Endpoint("d-1-0@10.0.1.0:7001", "10.0.1.0:7001", "decode"),
        Endpoint("d-2-0@10.0.2.0:7001", "10.0.2.0:7001", "decode"),
    }
    assert found(slice_of_service(service, others)) == set()


def test_a_pod_that_is_not_ready_stays_a_member_and_one_that_is_deleted_does_not() -> None:
    pods = [
        Pod("probe-fails", "10.0.0.1", ready=False),
        Pod("serves-its-last", "10.0.0.2", terminating=True),
        Pod("gone", "10.0.0.3", ready=False, terminating=True),
    ]
    assert {each.address for each in found(endpoint_slice("decode", pods))} == {"10.0.0.1:7000"}


def test_a_pod_in_both_families_is_one_worker_at_the_address_of_the_preferred_one() -> None:
    four = endpoint_slice("decode", [Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2")])
    six = endpoint_slice("decode", [Pod("a", "fd00::1"), Pod("c", "fd00::3")], family="IPv6")
    assert {each.address for each in found(four, six)} == {"10.0.0.1:7000", "10.0.0.2:7000", "[fd00::3]:7000"}
    assert {each.address for each in found(four, six, family="ipv6")} == {
        "[fd00::1]:7000",
        "10.0.0.2:7000",
        "[fd00::3]:7000",
    }


def test_a_pod_that_moves_between_slices_is_one_worker_and_is_deleted_as_soon_as_one_says_so() -> None:
    stale = endpoint_slice("decode", [Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2")], name="stale")
    fresh = endpoint_slice(
        "decode", [Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2", terminating=True)], name="fresh"
    )
    for order in itertools.permutations((stale, fresh)):
        assert found(*order) == {Endpoint("a@10.0.0.1:7000", "10.0.0.1:7000", "decode")}


def test_a_pod_that_two_pools_select_is_one_worker() -> None:
    slices = [endpoint_slice(pool, [Pod("a", "10.0.0.1")]) for pool in ("prefill", "decode")]
    for order in itertools.permutations(slices):
        assert found(*order) == {Endpoint("a@10.0.0.1:7000", "10.0.0.1:7000", "decode")}


def test_what_names_no_worker_that_can_be_dialled_is_left_out() -> None:
    empty = endpoint_slice("decode", [])
    bare: dict[str, Any] = {**empty, "endpoints": None, "ports": None}
    elsewhere = endpoint_slice("decode", [Pod("a", "10.0.0.1")], port_name="http")
    named = endpoint_slice("decode", [Pod("a", "worker.example.com")], family="FQDN")
    nowhere = endpoint_slice("decode", [Pod("a", "10.0.0.1")])
    nowhere["endpoints"][0]["addresses"] = []
    unlabelled = endpoint_slice("decode", [Pod("a", "10.0.0.1")])
    unlabelled["metadata"]["labels"] = None
    assert found(empty, bare, elsewhere, named, nowhere, unlabelled) == set()


def test_an_endpoint_without_conditions_or_a_pod_is_a_worker_all_the_same() -> None:
    one = endpoint_slice("decode", [])
    one["endpoints"] = [{"addresses": ["10.0.0.9"]}]
    assert found(one) == {Endpoint("decode@10.0.0.9:7000", "10.0.0.9:7000", "decode")}


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"metadata": {}}', b'{"addressType": "IPv4"}', b"\xff"])
def test_what_is_no_slice_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an EndpointSlice"):
        read_slice(raw, "session")


# -- events, in whatever order they come ------------------------------------------------------------

PODS = st.builds(
    Pod,
    name=st.sampled_from("abc"),
    host=st.sampled_from(("10.0.0.1", "10.0.0.2", "fd00::1")),
    ready=st.booleans(),
    terminating=st.booleans(),
)
CHANGES = st.tuples(
    st.sampled_from(("s1", "s2", "s3")),
    st.one_of(st.none(), st.tuples(st.sampled_from(("prefill", "decode")), st.lists(PODS, max_size=3))),
)
"""A slice by its name, and what becomes of it: None deletes it."""


@given(
    history=st.lists(CHANGES, max_size=12),
    relists=st.sets(st.integers(0, 12)),
    stale_slices=st.sets(st.integers(0, 12)),
    order=st.randoms(use_true_random=False),
)
def test_whatever_was_missed_and_listed_anew_the_members_are_those_of_the_slices_there_are(
    history: list[tuple[str, tuple[str, list[Pod]] | None]],
    relists: set[int],
    stale_slices: set[int],
    order: Any,
) -> None:
    server: dict[str, bytes] = {}
    copy = Copy()
    copy.replace(Listing("0", {}))
    sees = True
    for number, (name, change) in enumerate(history, 1):
        before = server.get(name)
        if change is None:
            server.pop(name, None)
        else:
            server[name] = json.dumps(endpoint_slice(change[0], change[1], name=name)).encode()
        sees = sees and number not in stale_slices
        if sees and (change is not None or before is not None):
            kind = "DELETED" if change is None else "ADDED" if before is None else "MODIFIED"
            value = server.get(name, before or b"")
            differs = copy.apply(Event(kind, name, str(number), value))
            assert differs == (server.get(name) != before)
        if number in relists:
            copy.replace(Listing(str(number), server))
            sees = True
    if not sees:
        copy.replace(Listing(str(len(history)), server))
    assert copy.objects == server
    slices = [read_slice(raw, "session") for raw in copy.objects.values()]
    members = workers(slices, "ipv4")
    order.shuffle(slices)
    assert workers(slices, "ipv4") == members
    assert len({each.worker_id for each in members}) == len(members)
    deleted = {place.pod for each in slices for place in each.places if place.terminating}
    standing = {place.pod for each in slices for place in each.places} - deleted
    assert {f"uid-{each.worker_id.partition('@')[0]}" for each in members} == standing


def test_a_bookmark_moves_the_version_and_nothing_else() -> None:
    copy = Copy({"one": b"1"}, "5")
    assert not copy.apply(Event("BOOKMARK", "", "9", b"{}"))
    assert (copy.objects, copy.version) == ({"one": b"1"}, "9")


def test_after_an_event_without_a_version_everything_is_to_be_listed() -> None:
    copy = Copy({}, "5")
    copy.apply(Event("ADDED", "one", "", b"1"))
    assert copy.version is None


def test_a_slice_says_on_which_node_and_in_which_zone_a_worker_is() -> None:
    one = endpoint_slice("decode", [Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2"), Pod("c", "10.0.0.3")])
    known, partly, endless = one["endpoints"]
    known |= {"nodeName": "n1", "zone": "eu-1a"}
    del partly["nodeName"]
    endless["nodeName"] = "n" * 300
    assert {each.address: each.locality for each in found(one)} == {
        "10.0.0.1:7000": Locality(node="n1", zone="eu-1a"),
        "10.0.0.2:7000": NOWHERE,
        "10.0.0.3:7000": NOWHERE,
    }


def test_a_zone_that_becomes_known_makes_no_other_worker() -> None:
    before, after = (
        endpoint_slice("decode", [Pod("a", "10.0.0.1")]),
        endpoint_slice("decode", [Pod("a", "10.0.0.1")]),
    )
    after["endpoints"][0]["zone"] = "eu-1a"
    assert found(before) == found(after)
