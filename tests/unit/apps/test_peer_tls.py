"""Which certificate a process presents; plain text only where the spec and the address allow it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvasir.clock import MonotonicClock
from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import dump, loads
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir_platform.apps.common.peer_tls import certified, router_files, with_tls_dir, worker_files

OPEN = "worker: {host: 10.0.0.7}\n"
STATIC = "discovery: {kind: static, endpoints: ['decode=10.0.0.8:7001']}\n"


def test_without_certificates_loopback_is_plain_text_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = loads("", "kvasir.yaml")
    assert router_files(spec) is worker_files(spec, "decode") is None
    assert caplog.text.count("plain text on loopback") == 2


def test_without_certificates_nothing_is_open_to_the_network() -> None:
    spec = loads(OPEN, "kvasir.yaml")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7 is on another machine.*--tls-dir"):
        worker_files(spec, "decode")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7 is on another machine"):
        router_files(spec)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.8 is on another machine"):
        router_files(loads(STATIC, "kvasir.yaml"))


def test_off_is_plain_text_everywhere_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert worker_files(loads(OPEN + "tls: {mode: 'off'}", "kvasir.yaml"), "decode") is None
    assert "10.0.0.7 travel in plain text" in caplog.text
    caplog.clear()
    assert worker_files(loads("tls: {mode: 'off'}", "kvasir.yaml"), "decode") is None
    assert caplog.text == ""


def up(spec: str, folder: Path) -> Deployment:
    """The deployment that `kvasir up` hands on."""
    return certified(loads(spec, "kvasir.yaml"), folder, MonotonicClock())[0]


def test_what_kvasir_up_makes_serves_every_role_of_the_spec_that_it_hands_on(tmp_path: Path) -> None:
    handed = loads(dump(up(OPEN, tmp_path)), "deployment.json")
    router, prefill = router_files(handed), worker_files(handed, "prefill")
    assert router is not None
    assert prefill is not None
    assert router.current().chain != prefill.current().chain


def test_kvasir_up_makes_and_renews_nothing_for_a_deployment_that_brings_its_own(tmp_path: Path) -> None:
    own = up("", tmp_path / "own")
    assert certified(own, tmp_path / "none", MonotonicClock()) == (own, None)
    off = loads("tls: {mode: 'off'}", "kvasir.yaml")
    assert certified(off, tmp_path / "none", MonotonicClock()) == (off, None)
    assert not (tmp_path / "none").exists()


def test_kvasir_up_refuses_certificates_that_a_role_cannot_use_before_it_starts(tmp_path: Path) -> None:
    own = up("", tmp_path)
    (tmp_path / "worker-decode.pem").write_bytes((tmp_path / "router.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"this process is spiffe://kvasir\.local/kvasir/worker/decode"):
        certified(own, tmp_path, MonotonicClock())
    with pytest.raises(ConfigError, match=r"tls\.cert_file: one certificate cannot be"):
        up("tls: {ca_file: /a, cert_file: /b, key_file: /c}", tmp_path)


async def test_kvasir_up_gives_what_renews_its_certificates(tmp_path: Path) -> None:
    class Waiting(MonotonicClock):
        async def sleep(self, seconds: float) -> None:
            slept.set_result(seconds)
            await asyncio.Event().wait()

    slept: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    renewing = certified(loads("", "kvasir.yaml"), tmp_path, Waiting())[1]
    assert renewing is not None
    task = asyncio.create_task(renewing())
    assert 0 < await slept <= 60
    task.cancel()


def test_named_files_are_used_and_must_be_of_the_role(tmp_path: Path) -> None:
    up("", tmp_path)
    own = tmp_path / "worker-decode.pem"
    spec = loads(f"tls: {{ca_file: {tmp_path}/ca.pem, cert_file: {own}, key_file: {own}}}", "kvasir.yaml")
    assert worker_files(spec, "decode") is not None
    with pytest.raises(ConfigError, match=r"this process is spiffe://kvasir\.local/kvasir/worker/prefill"):
        worker_files(spec, "prefill")
    assert with_tls_dir(spec, None) is spec
    assert with_tls_dir(spec, tmp_path).tls.cert_file is None


@pytest.mark.parametrize(
    ("tls", "said"),
    [
        ("{mode: files}", "mode files requires directory, or ca_file, cert_file and key_file"),
        ("{mode: 'off', directory: /d}", "mode off uses no certificates"),
        ("{cert_file: /c}", "ca_file is missing; set ca_file and key_file in addition to cert_file"),
        ("{directory: /d, ca_file: /c}", "directory replaces the single files"),
        ("{trust_domain: 'Not A Domain'}", "tls.trust_domain"),
        ("{rotate_h: 0}", "tls.rotate_h"),
    ],
)
def test_combinations_that_cannot_be_meant_are_refused(tls: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(f"tls: {tls}", "kvasir.yaml")
    assert said in caught.value.message
