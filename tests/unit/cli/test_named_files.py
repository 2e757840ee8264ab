"""`kvasir check` checks every file that a deployment names for errors, present or upcoming."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path

import pytest
from tests.kit.models.tiny_tokens import VOCABULARY

from kvasir.config.load.loader import load
from kvasir.performance.profile import FORMAT, CalibratedProfile, encode_profile
from kvasir_platform.cluster.certificates import CA_FILE, ROUTER_FILE, Authority
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import FileProbe
from kvasir_platform.cluster.preflight.named_files import file_findings, probe_named_files
from kvasir_platform.cluster.preflight.probe import probe

NOW = 1_800_000_000.0
DAY_S = 86_400.0
OURS = Authority.make("test", NOW - 400 * DAY_S, NOW + 400 * DAY_S)


def found(*overrides: str, **environment: str) -> dict[str, FileProbe]:
    return {each.field: each for each in probe_named_files(load(None, overrides), environment, NOW)}


def problems(*overrides: str) -> dict[str, str]:
    return {field: probed.problem for field, probed in found(*overrides).items()}


def test_a_draft_model_is_looked_for_where_the_start_will() -> None:
    field = "pools.decode.engine.speculative.model"
    option = "pools.decode.engine.speculative={method: draft_model, model: %s}"
    assert problems(option % "kvasir-tiny") == {field: ""}
    problem = problems(option % "/absent")[field]
    assert problem.startswith(f"cannot be used: {field} '/absent' is not a folder")
    absent = found(option % "owner/absent-draft")[field]
    assert (absent.problem, absent.warning) == ("", "(revision main) is not in the Hugging Face cache")


def test_a_draft_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    field = "pools.decode.engine.speculative.model"
    option = f"pools.decode.engine.speculative={{method: %s, model: {tmp_path}}}"
    reason = f"has a vocabulary of 7 tokens, and kvasir-tiny one of {VOCABULARY}"
    assert problems(option % "draft_model")[field] == reason
    assert problems(option % "eagle3")[field] == ""


def test_chat_templates_are_read_and_compiled(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% if %}")
    field = "model.chat_template"
    assert problems("model.chat_template='{{ messages }}'") == {field: ""}
    assert "does not compile" in problems(f"model.chat_template={file}")[field]
    assert "No such file" in problems("model.chat_template=/absent")[field]


def certificate(path: Path, begins_days: float = -90.0, ends_days: float = 90.0) -> Path:
    """A key and its certificate, valid between these moments from NOW, for their owner's eyes only."""
    begins_s, ends_s = NOW + begins_days * DAY_S, NOW + ends_days * DAY_S
    return private(path, OURS.certify("spiffe://x/y", "api.example.com", begins_s, ends_s))


def private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_profile_is_read_as_a_router_reads_it(tmp_path: Path) -> None:
    field, path = "performance.profile", tmp_path / "profile.json"
    assert "No such file" in problems(f"{field}={path}")[field]
    path.write_text("{}")
    assert "kvasir calibrate" in problems(f"{field}={path}")[field]
    path.write_bytes(encode_profile(CalibratedProfile(FORMAT, "m", "2026-01-02", {}, ())))
    assert not problems(f"{field}={path}")[field]


def test_every_file_that_the_spec_names_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "adapter_config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "keys").write_text("")
    names = ["whole", "bare", "absent", "keys"]
    assert problems(
        "lora=[" + ", ".join(f"{{name: {name}, path: {tmp_path / name}}}" for name in names) + "]",
        f"gateway.api_keys_file={tmp_path / 'keys'}",
        f"worker.session_token_file={tmp_path}",
        f"tls={{ca_file: {tmp_path / 'none'}, cert_file: {tmp_path / 'keys'}, key_file: {tmp_path}}}",
    ) == {
        "lora.whole.path": "",
        "lora.bare.path": "cannot be read: adapter_config.json: No such file or directory",
        "lora.absent.path": "does not exist",
        "lora.keys.path": "is not a folder",
        "gateway.api_keys_file": "holds no key",
        "worker.session_token_file": "is a folder",
        "tls.ca_file": "cannot be read: none: No such file or directory",
        "tls.cert_file": "is empty",
        "tls.key_file": "is a folder",
    }


def test_a_template_of_the_model_that_does_not_compile_is_an_error_unless_it_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    probed = found(f"model.source={tmp_path}")["model.chat_template"]
    assert "does not compile" in probed.problem
    assert probed.remedy.startswith("set model.chat_template")
    assert problems(f"model.source={tmp_path}", "model.chat_template='{{ messages }}'") == {
        "model.chat_template": ""
    }
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(f"model.source={tmp_path}") == {}


def test_an_adapter_of_a_higher_rank_than_engines_reserve_comes_with_the_rank_to_set(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text('{"r": 16}')
    adapter = f"lora=[{{name: sql, path: {tmp_path}}}]"
    higher = f"lora=[{{name: sql, path: {tmp_path}, rank: 12}}]"
    field = "lora.sql.path"
    (finding,) = file_findings((found(adapter)[field],))
    assert finding.message.endswith("has rank 16, and engines are started for ranks up to 8")
    assert finding.remedy == "set rank: 16 beside its path in `lora`"
    assert problems(higher) == {field: ""}
    config.write_text("{")
    assert "not valid JSON" in problems(adapter)[field]


def test_the_machine_is_measured_with_its_files(tmp_path: Path) -> None:
    (probed,) = probe(load(None, [f"worker.session_token_file={tmp_path}", "gateway.port=0"])).named_files
    assert probed == FileProbe("worker.session_token_file", str(tmp_path), "is a folder")


CLASSIFIER = "output_filters.classifier=[{{name: mod, url: 'https://mod.example.com/', {}}}]"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"secret", ""),
        (b"two words", "cannot be used: .* does not hold one token"),
        (b"", "is empty"),
        (None, "cannot be read: token: No such file or directory"),
    ],
)
def test_a_classifiers_token_is_looked_at_and_its_remedy_is_about_tokens(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        private(path, content)
    probed = found(CLASSIFIER.format(f"token_file: {path}"))["output_filters.mod.token_file"]
    assert re.fullmatch(problem, probed.problem)
    (finding,) = file_findings((probed,))
    assert finding.level == ("error" if problem else "ok")
    assert not problem or "the classifier's token" in finding.remedy


def test_a_classifiers_authorities_are_looked_at(tmp_path: Path) -> None:
    path = private(tmp_path / "ca.pem", b"nothing of the kind")
    probed = found(CLASSIFIER.format(f"ca_file: {path}"))["output_filters.mod.ca_file"]
    assert probed.problem == f"cannot be used: {path} holds no whole PEM certificate; write one into it"
    (finding,) = file_findings((probed,))
    assert "that sign the classifier's" in finding.remedy


def test_a_cache_secret_that_the_gateway_would_refuse_is_an_error(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", b"short")
    field = "tenancy.cache_secret_file"
    assert "fewer than 32 characters" in problems(f"{field}={path}")[field]
    private(path, b"0" * 32)
    assert problems(f"{field}={path}")[field] == ""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (hashlib.sha256(b"k").hexdigest().encode(), ""),
        (b"not a hash", "does not serve: .*keys:1: expected the SHA-256 .*"),
        (b"# nobody", "holds no key"),
        (None, "does not serve: .*: No such file or directory"),
    ],
)
def test_each_source_of_keys_is_read_as_the_gateway_would(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "keys"
    folder = tmp_path / "folder"
    if content is not None:
        path.write_bytes(content)
        folder.mkdir()
        (folder / "default").write_bytes(content)
    probed = problems(f"gateway.api_keys_file={path}", f"gateway.api_keys_dir={folder}")
    assert re.fullmatch(problem, probed["gateway.api_keys_file"])
    assert re.fullmatch(problem.replace("keys:1", "default:1"), probed["gateway.api_keys_dir"])


def test_keys_in_the_environment_are_looked_at() -> None:
    line = hashlib.sha256(b"k").hexdigest()
    assert found("gateway.api_keys_env=KEYS", KEYS=line)["gateway.api_keys_env"].problem == ""
    assert "variable KEYS is not set" in found("gateway.api_keys_env=KEYS")["gateway.api_keys_env"].problem


def test_a_secret_that_everybody_may_read_is_a_warning(tmp_path: Path) -> None:
    path = private(tmp_path / "token", b"x" * 32)
    field = "worker.session_token_file"
    assert found(f"{field}={path}")[field].warning == ""
    path.chmod(0o644)
    (finding,) = file_findings((found(f"{field}={path}")[field],))
    assert finding == Finding(
        "paths",
        "warning",
        f"{field}: {path} holds a secret, and every user of this machine can read it",
        f"chmod o-rwx {path}",
    )


@pytest.mark.parametrize(
    ("days", "problem", "warning"),
    [
        ((-90, 90), "", ""),
        ((-80, 10.0), "", "expires in 10.0 days, at .*"),
        ((-0.5, 0.5), "", ""),
        ((-0.8, 0.2), "", "expires in 0.2 days, at .*"),
        ((-90, -1), "is of no use: .*own.pem expired at .*; renew it, .*", ""),
        ((1, 90), "is of no use: .*own.pem is not valid before .*", ""),
    ],
    ids=["fresh", "old", "short-lived", "short-lived and old", "expired", "of tomorrow"],
)
@pytest.mark.parametrize("where", ["gateway.tls", "tls"])
def test_certificates_that_expire_are_told_of_in_time(
    tmp_path: Path, where: str, days: tuple[float, float], problem: str, warning: str
) -> None:
    file = certificate(tmp_path / "own.pem", *days)
    authority = private(tmp_path / "ca.pem", OURS.pem)
    more = f", ca_file: {authority}" if where == "tls" else ""
    probed = found(f"{where}={{cert_file: {file}, key_file: {file}{more}}}")[f"{where}.cert_file"]
    assert re.fullmatch(problem, probed.problem)
    assert re.fullmatch(warning, probed.warning)
    (finding,) = file_findings((probed,))
    assert finding.level == ("error" if problem else "warning" if warning else "ok")
    assert bool(finding.remedy) == bool(problem or warning)


def test_a_key_of_another_certificate_cannot_serve(tmp_path: Path) -> None:
    own, other = certificate(tmp_path / "own.pem"), certificate(tmp_path / "other.pem")
    probed = found(f"gateway.tls={{cert_file: {own}, key_file: {other}}}")
    assert "is not the key of" in probed["gateway.tls.cert_file"].problem


def test_of_a_bundle_of_authorities_the_one_that_lasts_counts(tmp_path: Path) -> None:
    old = Authority.make("old", NOW - 300 * DAY_S, NOW - DAY_S)
    own, bundle = certificate(tmp_path / "own.pem"), private(tmp_path / "ca.pem", old.pem + OURS.pem)
    tls = f"gateway.tls={{cert_file: {own}, key_file: {own}, client_ca_file: {bundle}}}"
    assert found(tls)["gateway.tls.client_ca_file"] == FileProbe("gateway.tls.client_ca_file", str(bundle))
    private(bundle, old.pem)
    assert "expired at" in problems(tls)["gateway.tls.client_ca_file"]


def test_an_operators_certificate_is_looked_at(tmp_path: Path) -> None:
    own, bundle = certificate(tmp_path / "own.pem"), private(tmp_path / "ca.pem", OURS.pem)
    tls = f"cert_file: {own}, key_file: {own}, client_ca_file: {bundle}"
    late = certificate(tmp_path / "operator.pem", -90.0, 3.0)
    probed = found(f"gateway.tls={{{tls}, operator_cert_file: {late}}}")["gateway.tls.operator_cert_file"]
    assert probed.warning.startswith("expires in 3.0 days")


def test_in_a_folder_of_certificates_each_is_looked_at(tmp_path: Path) -> None:
    name = f"tls.directory={tmp_path}"
    assert problems(name)["tls.directory"].startswith(f"is not good: {CA_FILE} cannot be read")
    private(tmp_path / CA_FILE, OURS.pem)
    certificate(tmp_path / ROUTER_FILE)
    assert found(name)["tls.directory"] == FileProbe("tls.directory", str(tmp_path))
    certificate(tmp_path / "worker-decode.pem", -80.0, 10.0)
    assert found(name)["tls.directory"].warning.startswith("ages: worker-decode.pem expires in 10.0 days")
    certificate(tmp_path / ROUTER_FILE, -80.0, -1.0)
    assert problems(name)["tls.directory"].startswith("is not good: router.pem is of no use")
    assert problems(f"tls.directory={tmp_path / 'none'}")["tls.directory"] == "does not exist"


def test_every_field_that_can_be_in_trouble_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    none = tmp_path / "none"
    redis = f"{{url: 'rediss://127.0.0.1:1', password_file: {none}, ca_file: {none}}}"
    probed = [
        *found(
            f"gateway.api_keys_file={none}", f"gateway.api_keys_dir={none}", "gateway.api_keys_env=NONE",
            f"gateway.tls={{cert_file: {none}, key_file: {none}, client_ca_file: {none}, "
            f"operator_cert_file: {none}}}",
            f"tenancy={{cache_secret_file: {none}, redis: {redis}}}", f"tiers.redis={redis}",
            f"tls={{ca_file: {none}, cert_file: {none}, key_file: {none}}}",
            f"worker.session_token_file={none}", CLASSIFIER.format(f"token_file: {none}, ca_file: {none}"),
        ).values(),
        *found(f"tls.directory={none}").values(),
    ]  # fmt: skip
    assert len(probed) == 19
    findings = list(file_findings(tuple(probed)))
    assert {finding.level for finding in findings} == {"error"}
    assert not any("PEFT" in finding.remedy for finding in findings)


def test_a_redis_of_limits_that_does_not_answer_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        deployment = load(None, [f"tenancy.redis.url={url}", "gateway.port=0"])
        reached = [each for each in examine(deployment, probe(deployment)) if each.check == "redis"]
    missed = [each for each in examine(deployment, probe(deployment)) if each.check == "redis"]
    assert [each.level for each in reached] == ["ok"]
    (finding,) = missed
    assert finding.level == "warning"
    assert finding.message.startswith("tenancy.redis: 127.0.0.1:")
    assert "each router counts limits on its own" in finding.remedy
