"""Decode workers near to the prefill worker: what a decision knows of the links between workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.load.loader import loads
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.locality import KNOWN_LINKS, NOWHERE, LinkClass, Locality, Nic, NicProtocol, link_class
from kvasir.core.requests import EngineLoad, Request, Role, Sampling, Timings, Usage, token_ids
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_router.build import make_machine
from kvasir_router.decide import CostPolicy, CostRates, Disaggregation, RateBook
from kvasir_router.decide.links import DEFAULT_LINKS, LinkSetting, link_rates_of
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.fleet.link_grid import link_grid
from kvasir_router.index import FleetIndex

PROMPT = 2000
TOKEN_BYTES = 131_072
"""KV of a token of Llama-3.1-8B in bf16."""
RATES = CostRates(prefill_token_s=2e-5, step_fixed_s=0.006, step_stream_s=0.0001, transfer_byte_s=1e-10)
HOME = Locality(node="n0", zone="z1", rack="r1", nvlink_domain="d1")
NVLINK = Locality("n1", "z1", "r1", "d1")
RACK = Locality("n2", "z1", "r1", "d2")
ZONE = Locality("n3", "z1", "r2", "d3")
FAR = Locality("n4", "z2", "r9", "d4")
NAMES = st.sampled_from(("", "a", "b", "c"))
PLACES = st.builds(Locality, node=NAMES, zone=NAMES, rack=NAMES, nvlink_domain=NAMES)


def identity(worker_id: str, role: Role = Role.DECODE, locality: Locality = NOWHERE) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=worker_id,
        epoch=1,
        pool=role.value,
        role=role,
        model="m",
        revision="",
        tokenizer_digest="t",
        max_model_len=8192,
        kv=KvLayout(16, "bf16", "nhd", 32, 8, 128, 16 * TOKEN_BYTES),
        kv_blocks=10_000,
        engine="fake",
        engine_version="0",
        transfer="fake",
        locality=locality,
    )


class LinkedFleet:
    """A fleet whose workers are added by name and place, and its decisions at the time `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = DecisionLog(64, policy="cost", stopwatch=lambda: 0.0, on_decision=lambda _: None)
        self.fleet = Fleet(
            CostPolicy(Disaggregation.ALWAYS, Random(1)),
            FleetIndex(capacity_blocks=4096, predicted_blocks=1024, predicted_ttl_s=60.0),
            RateBook(lambda _: RATES),
            hash_blocks=lambda *_: array("Q"),
            expected_output_tokens=100,
            decisions=self.log,
        )

    def add(self, worker_id: str, role: Role = Role.DECODE, locality: Locality = NOWHERE) -> None:
        self.fleet.add(worker_id, identity(worker_id, role, locality), 0.0)

    def plan(self, request_id: str = "r") -> Plan:
        request = Request(request_id, "m", token_ids([1] * PROMPT), Sampling(max_tokens=100))
        plan = self.fleet.plan(request, array("Q"), self.now)
        assert plan is not None
        return plan

    def decode_worker(self) -> str:
        return self.plan().decode.worker_id

    def busy(self, worker_id: str, streams: int) -> None:
        self.fleet.report(worker_id, EngineLoad(running=streams))

    def transferred(self, worker_id: str, seconds: float, source: str = "p") -> None:
        moved = PROMPT * TOKEN_BYTES
        usage = Usage(PROMPT, transferred_tokens=PROMPT, transferred_bytes=moved, output_tokens=1)
        target = RoutingTarget(worker_id)
        self.fleet.confirm("none", target, self.now)
        self.fleet.measured(target, usage, Timings(transfer_s=seconds), None, RoutingTarget(source))


@pytest.fixture
def linked() -> LinkedFleet:
    linked = LinkedFleet()
    linked.add("p", Role.PREFILL, HOME)
    return linked


# -- which place is chosen -------------------------------------------------------------------------


def test_of_decode_workers_at_equal_load_the_nearest_is_chosen(linked: LinkedFleet) -> None:
    for name, place in (("far", FAR), ("zone", ZONE), ("rack", RACK), ("nvlink", NVLINK)):
        linked.add(name, locality=place)
        assert linked.decode_worker() == name


def test_a_decode_worker_in_the_prefill_workers_nvlink_domain_is_preferred_at_equal_load(
    linked: LinkedFleet,
) -> None:
    linked.add("other-domain", locality=RACK)
    linked.add("same-domain", locality=NVLINK)
    for streams in (0, 16, 64):
        linked.busy("other-domain", streams)
        linked.busy("same-domain", streams)
        assert linked.decode_worker() == "same-domain"


def test_a_nearer_worker_that_is_busier_by_more_than_the_transfer_costs_is_not_chosen(
    linked: LinkedFleet,
) -> None:
    linked.add("near", locality=NVLINK)
    linked.add("far", locality=ZONE)
    chosen = []
    for streams in (0, 8, 32, 256):
        linked.busy("near", streams)
        chosen.append(linked.decode_worker())
    assert chosen[:2] == ["near", "near"]
    assert chosen[-1] == "far"


def test_a_transfer_between_zones_is_avoided_until_the_zone_is_much_busier(linked: LinkedFleet) -> None:
    linked.add("here", locality=ZONE)
    linked.add("there", locality=FAR)
    linked.busy("here", 16)
    assert linked.decode_worker() == "here"
    linked.busy("here", 2000)
    assert linked.decode_worker() == "there"


def test_of_two_prefill_workers_the_one_near_to_the_only_decode_worker_is_chosen(
    linked: LinkedFleet,
) -> None:
    linked.add("q", Role.PREFILL, FAR)
    linked.add("d", locality=replace(FAR, node="n9"))
    plan = linked.plan()
    assert plan.prefill is not None
    assert plan.prefill.worker_id == "q"


def test_a_near_worker_is_found_in_a_fleet_too_large_to_compare_all_pairs(linked: LinkedFleet) -> None:
    for number in range(80):
        linked.add(f"p{number}", Role.PREFILL, HOME)
        linked.add(f"far-{number}", locality=FAR)
        if number == 40:
            linked.add("near", locality=NVLINK)
    # By its load alone it would be the last of all, and not be compared.
    linked.busy("near", 2)
    assert linked.decode_worker() == "near"


def test_a_worker_that_leaves_and_returns_elsewhere_is_chosen_by_its_new_place(linked: LinkedFleet) -> None:
    linked.add("a", locality=RACK)
    linked.add("b", locality=NVLINK)
    assert linked.decode_worker() == "b"
    linked.fleet.remove("b")
    linked.add("b", locality=FAR)
    assert linked.decode_worker() == "a"


# -- what is not known changes nothing -------------------------------------------------------------


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), min_size=2, max_size=12),
    st.integers(0, 5),
)
def test_names_that_show_no_link_never_change_a_decision(
    workers: Sequence[tuple[bool, int]], rack_of: int
) -> None:
    """Nodes, racks and domains that differ say nothing while no zone is known; nor do NICs."""
    nic = Nic("mlx5_0", NicProtocol.RDMA, 400_000_000_000)
    plain, named = LinkedFleet(), LinkedFleet()
    for number, (prefills, streams) in enumerate(workers):
        role = Role.PREFILL if prefills else Role.DECODE
        place = Locality(f"n{number}", "", f"r{number}" * rack_of, f"d{number}", (nic,))
        for linked, locality in ((plain, NOWHERE), (named, place)):
            linked.add(f"w{number}", role, locality)
            linked.busy(f"w{number}", streams)
    if len({prefills for prefills, _ in workers}) < 2:
        return
    for number in range(8):
        plans = [linked.plan(f"r{number}") for linked in (plain, named)]
        assert plans[0] == plans[1]
        assert plans[0].predicted_ttft_s == plans[1].predicted_ttft_s
    assert named.log.explain("r0") == plain.log.explain("r0")


@given(st.lists(PLACES, min_size=1, max_size=8))
def test_the_grid_has_the_class_of_every_pair(places: Sequence[Locality]) -> None:
    grid = link_grid(places, np.arange(len(places)))
    expected = [[link_class(one, other) for other in places] for one in places]
    known = [
        link
        for i, row in enumerate(expected)
        for j, link in enumerate(row)
        if i != j and link is not LinkClass.UNKNOWN
    ]
    assert (grid is None) == (not known)
    if grid is not None:
        assert grid.tolist() == expected


# -- what is measured ------------------------------------------------------------------------------


def test_a_near_link_that_is_measured_to_be_slow_is_avoided_and_tried_again_after_minutes(
    linked: LinkedFleet,
) -> None:
    linked.add("near", locality=NVLINK)
    linked.add("zone", locality=ZONE)
    chosen = []
    for _ in range(60):
        chosen.append(linked.decode_worker())
        linked.transferred(chosen[-1], 0.8 if chosen[-1] == "near" else 0.05)
    assert chosen[:2] == ["near", "near"]
    assert chosen[-20:] == ["zone"] * 20
    for seconds, expected in ((60.0, "zone"), (600.0, "near")):
        linked.now += seconds
        linked.transferred("zone", 0.05)
        assert linked.decode_worker() == expected


def test_the_first_transfer_of_a_pair_which_also_connects_it_does_not_exclude_its_link(
    linked: LinkedFleet,
) -> None:
    linked.add("near", locality=NVLINK)
    linked.add("zone", locality=ZONE)
    linked.transferred("near", 2.0)
    assert linked.decode_worker() == "near"


def test_a_class_is_not_expected_to_be_faster_than_a_nearer_one_that_was_measured(
    linked: LinkedFleet,
) -> None:
    linked.add("near", locality=RACK)
    for _ in range(40):
        linked.transferred("near", 1.0)
    links = linked.fleet.rates("near").links
    seconds = [links.fixed_s[link] + links.byte_s[link] * PROMPT * TOKEN_BYTES for link in KNOWN_LINKS]
    assert seconds[LinkClass.RACK] == pytest.approx(1.0, rel=0.1)
    assert seconds[LinkClass.ZONE] >= seconds[LinkClass.RACK]
    assert seconds[LinkClass.NVLINK] < 0.01


def test_a_worker_whose_link_is_slower_than_its_pools_is_known_by_its_own_transfers(
    linked: LinkedFleet,
) -> None:
    for name in ("slow", "d1", "d2"):
        linked.add(name, locality=RACK)
    for _ in range(60):
        for name, seconds in (("slow", 0.4), ("d1", 0.02), ("d2", 0.02)):
            linked.transferred(name, seconds)
    slow, well = (linked.fleet.rates(name).links.byte_s[LinkClass.RACK] for name in ("slow", "d1"))
    assert slow > 5 * well
    assert linked.decode_worker() != "slow"


def test_a_transfer_from_a_worker_that_is_gone_is_of_no_class(linked: LinkedFleet) -> None:
    linked.add("d", locality=RACK)
    linked.transferred("d", 0.5, source="gone")
    assert linked.fleet.rates("d").links == DEFAULT_LINKS
    assert linked.fleet.rates("d").transfer_byte_s > RATES.transfer_byte_s
    assert list(linked.fleet.received.totals()) == [LinkClass.UNKNOWN]


def test_bytes_are_counted_by_the_class_of_their_link(linked: LinkedFleet) -> None:
    linked.add("near", locality=NVLINK)
    linked.add("far", locality=FAR)
    for worker_id in ("near", "far", "far"):
        linked.transferred(worker_id, 0.5)
    totals = linked.fleet.received.totals()
    assert {link: (each.transfers, each.bytes, each.seconds) for link, each in totals.items()} == {
        LinkClass.NVLINK: (1, PROMPT * TOKEN_BYTES, 0.5),
        LinkClass.CROSS_ZONE: (2, 2 * PROMPT * TOKEN_BYTES, 1.0),
    }


# -- estimates, and what is shown ------------------------------------------------------------------


def test_estimates_grow_with_the_distance() -> None:
    assert list(DEFAULT_LINKS.byte_s) == sorted(DEFAULT_LINKS.byte_s)
    assert list(DEFAULT_LINKS.fixed_s) == sorted(DEFAULT_LINKS.fixed_s)


def test_the_rate_of_a_workers_nic_is_that_of_its_links_beyond_the_node() -> None:
    nic = Nic("mlx5_0", NicProtocol.RDMA, 400_000_000_000)
    links = link_rates_of(identity("d", locality=Locality(nics=(nic,))))
    assert links.byte_s[LinkClass.RACK] == pytest.approx(1 / 4e10)
    assert links.byte_s[LinkClass.ZONE] == pytest.approx(1 / 2e10)
    assert links.byte_s[LinkClass.NVLINK] == DEFAULT_LINKS.byte_s[LinkClass.NVLINK]
    slow = replace(nic, protocol=NicProtocol.ETHERNET, bits_per_s=1_000_000_000)
    links = link_rates_of(identity("d", locality=Locality(nics=(slow,))))
    assert links.byte_s[LinkClass.CROSS_ZONE] == links.byte_s[LinkClass.RACK] == pytest.approx(1e-8)


def test_what_an_operator_sets_replaces_the_estimate() -> None:
    settings = {
        LinkClass.ZONE: LinkSetting(bytes_per_s=1e9),
        LinkClass.CROSS_ZONE: LinkSetting(latency_s=0.5),
    }
    links = link_rates_of(identity("d"), settings)
    assert links.byte_s[LinkClass.ZONE] == 1e-9
    assert links.fixed_s == (*DEFAULT_LINKS.fixed_s[: LinkClass.CROSS_ZONE], 0.5)


def test_the_spec_sets_what_is_expected_of_a_class() -> None:
    said = ["transfer.links.cross_zone.bytes_per_s=1e9", "transfer.links.rack.latency_s=0.25"]
    fleet = make_machine(loads("name: t", "t.yaml", said), Random(1)).fleet
    fleet.add("d", identity("d"), 0.0)
    links = fleet.rates("d").links
    assert links.byte_s[LinkClass.CROSS_ZONE] == pytest.approx(1e-9)
    assert links.fixed_s[LinkClass.RACK] == 0.25
    assert links.byte_s[LinkClass.RACK] == DEFAULT_LINKS.byte_s[LinkClass.RACK]


def test_a_decision_shows_the_link_of_each_decode_worker_and_its_transfer(linked: LinkedFleet) -> None:
    linked.add("far", locality=FAR)
    linked.add("near", locality=NVLINK)
    linked.add("somewhere")
    linked.plan("r")
    record = linked.log.explain("r")
    assert record is not None
    (prefill, decode) = record.parts
    assert [place.link for place in prefill.places] == [""]
    links = {place.worker_id: place.link for place in decode.places}
    assert links == {"far": "cross_zone", "near": "nvlink", "somewhere": "unknown"}
    transfers = {place.worker_id: place.terms["transfer_s"] for place in decode.places}
    moved = PROMPT * TOKEN_BYTES
    assert transfers["near"] == pytest.approx(0.003 + moved / 4e11)
    assert transfers["far"] == pytest.approx(0.006 + moved / 6e8)
    assert transfers["somewhere"] == pytest.approx(RATES.transfer_fixed_s + moved / 1e10)
    chosen = next(place for place in decode.places if place.chosen)
    assert chosen.worker_id == "near"
    assert chosen.total == min(place.total for place in decode.places)
