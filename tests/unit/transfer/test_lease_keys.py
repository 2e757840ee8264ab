"""A ticket has the key of its lease, and nothing from which another key follows."""

from __future__ import annotations

import logging

import pytest

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.lease_keys import (
    LOG_EVERY_S,
    SECRET_BYTES,
    Refusals,
    issue,
    lease_key,
    mac,
    make_secret,
    opened,
    opened_one,
    seal,
)

SECRET, OTHER = b"s" * SECRET_BYTES, b"o" * SECRET_BYTES


def test_a_ticket_has_the_key_of_its_lease_and_not_the_secret() -> None:
    ticket = issue(seal("endpoint", [SECRET, b"", OTHER]), "lease", 7)
    endpoint, keys = opened(ticket)
    assert endpoint == "endpoint"
    assert keys == (lease_key(SECRET, "lease", 7), b"", lease_key(OTHER, "lease", 7))
    assert SECRET.hex() not in ticket
    assert OTHER.hex() not in ticket
    assert opened_one(issue(seal("endpoint", [SECRET]), "lease", 7)) == ("endpoint", keys[0])


def test_every_lease_every_fence_and_every_agent_has_another_key() -> None:
    leases = [("lease", 1), ("lease", 2), ("lease", 256), ("other", 1), ("", 1)]
    keys = {lease_key(secret, *lease) for secret in (SECRET, OTHER, make_secret()) for lease in leases}
    assert len(keys) == 3 * len(leases)


def test_parts_of_a_code_cannot_be_shifted_into_each_other() -> None:
    assert mac(SECRET, b"ab", b"c") != mac(SECRET, b"a", b"bc")
    assert mac(SECRET, b"ab") != mac(SECRET, b"a", b"b")


def test_an_agent_without_a_secret_has_the_same_endpoint_for_every_lease() -> None:
    assert issue("endpoint", "lease", 7) == "endpoint"
    assert opened("endpoint") == ("endpoint", ())


@pytest.mark.parametrize("text", ["endpoint.xyz", "endpoint.abcd", f"endpoint.{'00' * 31}"])
def test_a_malformed_key_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match="key"):
        opened(text)


@pytest.mark.parametrize("text", ["endpoint", "endpoint.", f"endpoint.{'00' * 32},{'00' * 32}"])
def test_a_ticket_of_one_agent_has_one_key(text: str) -> None:
    with pytest.raises(TransferError, match="no key"):
        opened_one(text)


def test_every_refused_peer_is_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.add("it has no ticket")
        assert refusals.take() == 1000
        assert refusals.take() == 0
        now = LOG_EVERY_S
        refusals.add("it has no ticket")
    first, second = [record.getMessage() for record in caplog.records]
    assert "refused 1 peers" in first
    assert "refused 1000 peers" in second
