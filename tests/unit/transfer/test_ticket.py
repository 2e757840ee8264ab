"""Tickets and endpoints survive the path through the router; malformed ones are refused."""

from __future__ import annotations

import zlib
from base64 import b85encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer.common import ticket
from kvasir_workers.transfer.common.ticket import MAX_DECODED_BYTES, MAX_ENCODED_BYTES, Ticket, decode, encode
from kvasir_workers.transfer.nixl import endpoint
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint

LAYOUT = KvLayout(32, "float32", "BHNC", 4, 4, 32, 4096)
REGIONS = (KvRegion(2**47, 4096, 100, "cuda:3"),)


def made(version: int = endpoint.VERSION) -> NixlEndpoint:
    return NixlEndpoint(version, "agent", b"\x00metadata\xff", REGIONS, 2**46, 2**45, 1 << 20, 2, LAYOUT)


def test_a_ticket_survives_the_way() -> None:
    sent = Ticket(("endpoint of rank 0", "endpoint of rank 1"), (5, 6, 7, 1), 9)
    assert decode(encode(sent)) == sent


def test_an_endpoint_survives_the_way() -> None:
    assert endpoint.decode(endpoint.encode(made())) == made()


@given(st.text(max_size=200))
def test_any_text_is_decoded_or_refused(text: str) -> None:
    try:
        decode(text)
    except TransferError:
        return


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=84))
def test_a_ticket_with_a_changed_character_is_refused_or_says_the_same(position: int, shift: int) -> None:
    ticket = Ticket(("endpoint",) * 2, tuple(range(50)), 50)
    sent = encode(ticket)
    alphabet = b85encode(bytes(range(256)) * 4).decode()
    index = position % len(sent)
    other = next(c for c in alphabet[shift:] if c != sent[index])
    try:
        found = decode(sent[:index] + other + sent[index + 1 :])
    except TransferError:
        return
    assert found == ticket  # base 85 fills the last group up with bits that carry nothing


def test_a_ticket_that_is_cut_short_is_refused() -> None:
    sent = encode(Ticket(("endpoint",), tuple(range(50)), 50))
    with pytest.raises(TransferError):
        decode(sent[: len(sent) // 2])


def test_a_ticket_that_unpacks_to_too_much_is_refused() -> None:
    bomb = b85encode(zlib.compress(bytes(MAX_DECODED_BYTES + 1))).decode()
    with pytest.raises(TransferError, match="cut short or too long"):
        decode(bomb)
    with pytest.raises(TransferError, match="exceeds"):
        decode("0" * (MAX_ENCODED_BYTES + 1))


def test_an_endpoint_of_another_version_is_refused() -> None:
    with pytest.raises(TransferError, match="version 99"):
        endpoint.decode(endpoint.encode(made(version=99)))
    with pytest.raises(TransferError):
        endpoint.decode(ticket.pack(b"\x93\x01\x02\x03"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"leases": -1}, "no process"),
        ({"leases": (1 << 63) - 1}, "no process"),
        ({"pages": 1 << 63}, "no process"),
        ({"page_bytes": -1}, "no process"),
        ({"regions": (KvRegion(-4096, 4096, 100),)}, "no process"),
        ({"regions": (KvRegion(1 << 40, 4096, 1 << 60),)}, "no process"),
        ({"regions": (KvRegion(1 << 40, 4096, 100, "cuda:x"),)}, "no process"),
        ({"parts": -1}, "has -1 checksums"),
        ({"parts": 3}, "3 parts"),
        ({"parts": 1 << 62}, "parts"),
    ],
)
def test_an_endpoint_whose_numbers_make_no_read_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(TransferError, match=what):
        endpoint.decode(endpoint.encode(structs.replace(made(), **changes)))
