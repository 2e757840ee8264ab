"""`kvasir up` keeps a private secret for cache salts if callers are authenticated."""

from __future__ import annotations

import stat
from pathlib import Path

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.apps.up_app import with_cache_secret
from kvasir_platform.gateway.tenants.salts import cache_secret


def test_a_secret_is_made_once_and_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.secret"
    asks = load(None, ["gateway.api_keys_file=/keys"])
    made = with_cache_secret(asks, path)
    assert made.tenancy.cache_secret_file == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = cache_secret(path)
    assert with_cache_secret(asks, path) == made
    assert cache_secret(path) == first


def test_a_deployment_that_names_one_or_tells_nobody_apart_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cache.secret"
    named = load(None, ["gateway.api_keys_file=/keys", "tenancy.cache_secret_file=/secret"])
    assert with_cache_secret(named, path) is named
    everybody = Deployment()
    assert with_cache_secret(everybody, path) is everybody
    assert not path.exists()
