"""The class of the link between two workers, from what is known of their places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.locality import KNOWN_LINKS, LinkClass, Locality, Nic, NicProtocol, link_class

HERE = Locality(node="n1", zone="z1", rack="r1", nvlink_domain="d1")
NAMES = st.sampled_from(("", "a", "b"))
PLACES = st.builds(Locality, node=NAMES, zone=NAMES, rack=NAMES, nvlink_domain=NAMES)


@pytest.mark.parametrize(
    ("there", "link"),
    [
        (Locality("n2", "z1", "r1", "d1"), LinkClass.NVLINK),
        (Locality("n1", "z1", "r1", "d2"), LinkClass.NODE),
        (Locality("n1"), LinkClass.NODE),
        (Locality("n2", "z1", "r1", "d2"), LinkClass.RACK),
        (Locality(rack="r1"), LinkClass.RACK),
        (Locality("n2", "z1", "r2"), LinkClass.ZONE),
        (Locality(zone="z1"), LinkClass.ZONE),
        (Locality("n2", "z2", "r2", "d2"), LinkClass.CROSS_ZONE),
        (Locality(zone="z2"), LinkClass.CROSS_ZONE),
        (Locality("n2", rack="r2", nvlink_domain="d2"), LinkClass.UNKNOWN),
        (Locality(), LinkClass.UNKNOWN),
    ],
)
def test_the_nearest_name_that_two_workers_share_is_the_class_of_their_link(
    there: Locality, link: LinkClass
) -> None:
    assert link_class(HERE, there) is link


def test_racks_of_one_name_in_two_zones_are_two_racks() -> None:
    assert link_class(Locality(zone="z1", rack="r1"), Locality(zone="z2", rack="r1")) is LinkClass.CROSS_ZONE


@given(PLACES, PLACES)
def test_a_link_is_of_one_class_from_either_end(one: Locality, other: Locality) -> None:
    assert link_class(one, other) is link_class(other, one)


@given(PLACES)
def test_nothing_is_known_of_the_link_to_a_worker_whose_place_is_unknown(one: Locality) -> None:
    assert link_class(one, Locality()) is LinkClass.UNKNOWN


def test_classes_are_ordered_from_near_to_far_with_the_unknown_last() -> None:
    assert [link.label for link in KNOWN_LINKS] == ["nvlink", "node", "rack", "zone", "cross_zone"]
    assert max(LinkClass) is LinkClass.UNKNOWN


def test_the_rate_of_a_worker_is_that_of_its_fastest_rdma_device_if_it_has_any() -> None:
    ethernet = Nic("eth0", NicProtocol.ETHERNET, 400_000_000_000)
    slow, fast = (Nic(f"mlx5_{i}", NicProtocol.RDMA, rate) for i, rate in enumerate((10**11, 2 * 10**11)))
    assert Locality(nics=(slow, ethernet, fast)).nic_bits_per_s == 2 * 10**11
    assert Locality(nics=(ethernet,)).nic_bits_per_s == 4 * 10**11
    assert Locality().nic_bits_per_s == 0


def test_names_and_nics_are_bounded() -> None:
    with pytest.raises(ValueError, match="more than 253 characters"):
        Locality(rack="r" * 254)
    with pytest.raises(ValueError, match="33 NICs are more than 32"):
        Locality(nics=(Nic("eth0", NicProtocol.ETHERNET),) * 33)
