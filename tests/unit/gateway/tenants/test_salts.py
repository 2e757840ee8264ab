"""Cache salts: one per sharing group, derived from a required secret, revealing nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ConfigError
from kvasir.native.salt_places import salt_after, salt_place
from kvasir_platform.gateway.tenants.salts import CacheScope, Open, cache_secret, keep_cache_secret

SECRET = b"s" * 32
NAMES = st.sampled_from(["a", "b", "shared", "own", "a-b"])
CACHES = st.sampled_from(["own", "shared:a", "shared:own"])
CLIENTS = st.text(max_size=4) | st.sampled_from(["", "a", "own", "tenant\na"])


@given(a=st.tuples(CACHES, NAMES, CLIENTS), b=st.tuples(CACHES, NAMES, CLIENTS))
def test_two_requests_have_one_salt_only_if_they_may_share(
    a: tuple[str, str, str], b: tuple[str, str, str]
) -> None:
    def who(cache: str, tenant: str, client: str) -> tuple[str, str]:
        return (f"own {tenant}" if cache == "own" else cache), client

    same = CacheScope(SECRET, *a[:2]).salt(a[2]) == CacheScope(SECRET, *b[:2]).salt(b[2])
    assert same == (who(*a) == who(*b))


def test_salts_are_of_the_deployment_and_stay() -> None:
    salt = CacheScope(SECRET, "own", "red").salt()
    assert salt == CacheScope(SECRET, "own", "red").salt("")
    assert salt != CacheScope(b"t" * 32, "own", "red").salt()
    assert salt == "b8ITcy6gnPdc5WGYzVPt8YBbimb_ZxtgG2xBOZrvWi0"


def test_a_salt_shows_neither_the_tenant_nor_what_the_client_sent() -> None:
    salt = CacheScope(SECRET, "own", "red").salt("my-secret-salt")
    assert len(salt) == 43
    assert not any(text in salt for text in ("red", "secret", "salt"))


def test_where_nobody_is_told_apart_the_clients_own_salt_is_all_there_is() -> None:
    assert [Open().salt(), Open().salt("x")] == ["", "x"]


def test_a_clients_salt_is_never_taken_for_one_with_a_place() -> None:
    for salt in (Open().salt(salt_after(8, "x")), CacheScope(SECRET, "own", "red").salt(salt_after(8, "x"))):
        assert salt_place(salt) is None


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.secret"
    keep_cache_secret(path)
    first = cache_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keep_cache_secret(path)
    assert cache_secret(path) == first
    keep_cache_secret(tmp_path / "another")
    assert cache_secret(tmp_path / "another") != first
    with pytest.raises(ConfigError):
        keep_cache_secret(tmp_path / "none" / "cache.secret")


def test_a_secret_that_is_none_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2\n")
    with pytest.raises(ConfigError, match=r"tenancy\.cache_secret_file") as caught:
        cache_secret(path)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        cache_secret(tmp_path / "none")


def test_without_a_file_the_secret_is_of_this_process_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = cache_secret(None)
    assert one != cache_secret(None)
    assert "tenancy.cache_secret_file" in caplog.text
    assert one.hex() not in caplog.text
