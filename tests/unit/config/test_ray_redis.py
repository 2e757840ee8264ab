"""The Redis of Ray's head, and the authority of its certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.config.load.loader import load
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.head import head_environment


def test_rays_head_is_told_the_authority_of_its_redis(tmp_path: Path) -> None:
    url, ca = "rediss://redis.example.com:6380", "/etc/ca.pem"
    spec = load(None, [f"ray.head_redis_url={url}", f"ray.head_redis_ca_file={ca}"]).ray
    own = head_environment(tmp_path, spec.head_redis_url, spec.head_redis_ca_file)
    assert (own["RAY_REDIS_ADDRESS"], own["RAY_REDIS_CA_CERT"]) == (url, ca)
    assert "RAY_REDIS_CA_CERT" not in head_environment(tmp_path, url)
    assert "RAY_REDIS_CA_CERT" not in head_environment(tmp_path, None)


@pytest.mark.parametrize("url", [None, "redis://redis.example.com:6379", "redis.example.com:6379"])
def test_an_authority_without_tls_is_refused(url: str | None) -> None:
    named = [] if url is None else [f"ray.head_redis_url={url}"]
    with pytest.raises(ConfigError, match="does not use TLS"):
        load(None, [*named, "ray.head_redis_ca_file=/etc/ca.pem"])
