"""Certificates of a cluster: mutual trust while authorities change, and certificate requests."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest
from cryptography import x509
from tests.kit.cluster.api_server import ApiServer, api_server
from tests.kit.gateway.api_requests import Rule

from kvasir.core.errors import ConfigError
from kvasir.wire.tls import TlsFiles, TlsNames, TlsPaths
from kvasir_platform.apps.certify import KNOWN_AFTER_S, NEXT, Made, Secrets, main, renewed, run
from kvasir_platform.cluster.certificates import CA_FILE, ROUTER_FILE, worker_file
from kvasir_platform.cluster.kubernetes.access import Access

NAMES = TlsNames("kvasir.local", "llm")
SECRETS = "/api/v1/namespaces/default/secrets"
DAY_S = 86_400.0
LIFE_S = 30 * DAY_S
START_S = 1_900_000_000.0


def certify(kept: dict[str, bytes], now: float, pools: tuple[str, ...] = ("decode",)) -> Made:
    return renewed(kept, NAMES, pools, life_s=LIFE_S, now=now)


def accepted(reader: Made, shower: Made, file: str = ROUTER_FILE) -> bool:
    """Whether who has read `reader` accepts the certificate of `file` in `shower`."""
    certificate = x509.load_pem_x509_certificate(shower.roles[file])
    for authority in x509.load_pem_x509_certificates(reader.roles[CA_FILE]):
        if authority.subject == certificate.issuer:
            certificate.verify_directly_issued_by(authority)
            return True
    return False


def test_each_role_gets_what_its_process_accepts(tmp_path: Path) -> None:
    made = certify({}, START_S, ("prefill", "decode"))
    for name, data in made.roles.items():
        (tmp_path / name).write_bytes(data)
    for file, uri, dns in (
        (ROUTER_FILE, NAMES.router, NAMES.router_dns),
        (worker_file("prefill"), NAMES.worker("prefill"), NAMES.worker_dns("prefill")),
        (worker_file("decode"), NAMES.worker("decode"), NAMES.worker_dns("decode")),
    ):
        paths = TlsPaths(tmp_path / CA_FILE, tmp_path / file, tmp_path / file)
        TlsFiles(paths, uri=uri, dns=dns, wall_time=lambda: START_S + 1)


def test_whoever_reads_a_roles_files_can_certify_nobody() -> None:
    made = certify({}, START_S)
    for name, data in made.roles.items():
        assert data.count(b"PRIVATE KEY") == (0 if name == CA_FILE else 2)
        assert made.authority["signer.pem"].split(b"-----BEGIN CERTIFICATE")[0] not in data


def test_at_every_renewal_the_old_and_the_new_files_accept_each_other() -> None:
    """Two years of weekly runs: pods take up the new files at different times."""
    before, authorities, now = certify({}, START_S), set(), START_S
    for _ in range(104):
        now += 7 * DAY_S
        after = certify(before.authority, now)
        for file in (ROUTER_FILE, worker_file("decode")):
            assert accepted(before, after, file)
            assert accepted(after, before, file)
        for authority in x509.load_pem_x509_certificates(after.roles[CA_FILE]):
            authorities.add(authority.serial_number)
        signer = x509.load_pem_x509_certificate(after.authority["signer.pem"])
        leaf = x509.load_pem_x509_certificate(after.roles[ROUTER_FILE])
        assert signer.not_valid_after_utc > leaf.not_valid_after_utc
        before = after
    assert len(authorities) >= 3


def test_a_run_right_after_a_successor_was_announced_does_not_let_it_sign_yet() -> None:
    first = certify({}, START_S)
    late = START_S + LIFE_S * 7
    announced = certify(first.authority, late)
    assert NEXT in announced.authority
    again = certify(announced.authority, late + 60)
    assert NEXT in again.authority
    assert accepted(first, again)
    signed = certify(again.authority, late + KNOWN_AFTER_S)
    assert NEXT not in signed.authority
    assert not accepted(first, signed)
    assert accepted(announced, signed)


def test_what_is_no_authority_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"signer\.pem of the authority's Secret .*; empty the Secret"):
        certify({"signer.pem": b"nonsense"}, START_S)


def make_secrets(server: ApiServer) -> None:
    for name in ("llm-authority", "llm-tls"):
        server.put(SECRETS, {"metadata": {"name": name}})


async def asked(server: ApiServer, folder: Path, pools: tuple[str, ...], now: float = START_S) -> None:
    access = Access(server.host, server.port, server.write_credentials(folder))
    await asyncio.to_thread(
        lambda: run(
            Secrets(access),
            NAMES,
            pools,
            authority="llm-authority",
            secret="llm-tls",
            life_s=LIFE_S,
            now=now,
        )
    )


def held(server: ApiServer, name: str) -> dict[str, bytes]:
    data = server._objects[SECRETS, name]["data"]
    return {key: base64.b64decode(value) for key, value in data.items()}


LEAST = (Rule(verbs=("get", "patch"), resources=("secrets",), groups=("",)),)


async def test_both_secrets_are_filled_with_the_rights_that_the_chart_gives(tmp_path: Path) -> None:
    async with api_server(tmp_path) as server:
        server.rules["system:serviceaccount:default:router"] = LEAST
        make_secrets(server)
        await asked(server, tmp_path / "account", ("prefill", "decode"))
        workers = {"worker-prefill.pem", "worker-decode.pem"}
        assert set(held(server, "llm-tls")) == {CA_FILE, ROUTER_FILE, *workers}
        first = held(server, "llm-authority")
        await asked(server, tmp_path / "account", ("serve",), START_S + DAY_S)
        assert held(server, "llm-authority") == first
        assert set(held(server, "llm-tls")) == {CA_FILE, ROUTER_FILE, "worker-serve.pem"}


async def test_two_runs_at_once_do_not_mix_their_authorities(tmp_path: Path) -> None:
    async with api_server(tmp_path) as server:
        make_secrets(server)
        runs = [asked(server, tmp_path / f"account-{n}", ("decode",)) for n in range(2)]
        ended = await asyncio.gather(*runs, return_exceptions=True)
        assert any(each is None for each in ended)
        made = Made(held(server, "llm-authority"), held(server, "llm-tls"))
        assert accepted(made, made)


async def test_a_missing_right_is_named(tmp_path: Path) -> None:
    only_read = (Rule(verbs=("get",), resources=("secrets",), groups=("",)),)
    async with api_server(tmp_path) as server:
        server.rules["system:serviceaccount:default:router"] = only_read
        make_secrets(server)
        with pytest.raises(ConfigError, match=r"to PATCH the Secret llm-authority \(403\).*cannot patch"):
            await asked(server, tmp_path / "account", ("decode",))


def test_outside_a_cluster_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "kvasir.yaml").write_text("version: kvasir/v1\n")
    arguments = ["--deployment", str(tmp_path / "kvasir.yaml"), "--secret", "a", "--authority", "b"]
    assert main(arguments) == 1
    assert "KUBERNETES_SERVICE_HOST" in capsys.readouterr().err
