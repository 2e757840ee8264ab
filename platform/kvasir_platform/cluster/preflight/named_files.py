"""Checks whether the files that a deployment names can be used, and for how long.

A file that the gateway or a worker would reject at its start is an error. What fails later, such as a
certificate about to expire or a secret that every local user can read, is a warning.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.load.model_files import configured_template, resolve_model
from kvasir.config.load.support import adapter_slots
from kvasir.config.spec.deployment import Deployment, SpeculativeSpec
from kvasir.core.errors import ConfigError
from kvasir.wire.tls import certificate_problem, certificates_in, read_pem, validity_problem
from kvasir_platform.calibrate.files import read_profile
from kvasir_platform.cluster.certificates import CA_FILE, ROUTER_FILE, worker_file
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import FileProbe
from kvasir_platform.gateway.http.outbound_client import read_token
from kvasir_platform.gateway.identity.keys import parse_keys, read_sources
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate
from kvasir_platform.gateway.tenants.salts import cache_secret

EXPIRES_SOON_S = 14 * 86_400.0
_RENEWED_BY = 2 / 3
"""Share of its lifetime that an automatically renewed certificate reaches at most; a short lifetime alone is
no reason to warn."""

_PASSWORD = "write the password into it, or leave it unset if none is needed"  # noqa: S105 - advice
_SERVERS_CA = "write the PEM certificates that sign the server's into it, or correct the path"
_REMEDIES = {
    "model.chat_template": "write the Jinja of the template, or the path of a file with it",
    "gateway.api_keys_file": "write one SHA-256 of an API key a line into it, or correct the path",
    "gateway.api_keys_dir": "write lines of `kvasir keys new` into its files, or correct the path",
    "gateway.api_keys_env": "set it to lines that `kvasir keys new` makes, or correct the name",
    "performance.profile": "write it with `kvasir calibrate`, or correct the path",
    "gateway.token_issuers.ca_file": "write the PEM certificates that sign the provider's into it",
    "gateway.tls.cert_file": "renew it, or correct the path; without gateway.tls, plain HTTP is served",
    "gateway.tls.key_file": "write the certificate's PEM private key into it, or correct the path",
    "gateway.tls.client_ca_file": "write the authorities' PEM certificates into it, or correct the path",
    "gateway.tls.operator_cert_file": "write a PEM certificate and its key, or leave it to `kvasir up`",
    "tenancy.cache_secret_file": "write a long random secret into it, or leave it unset for `kvasir up`",
    "tenancy.redis.password_file": _PASSWORD,
    "tenancy.redis.ca_file": _SERVERS_CA,
    "gateway.batches.redis.password_file": _PASSWORD,
    "gateway.batches.redis.ca_file": _SERVERS_CA,
    "gateway.batches.s3.ca_file": _SERVERS_CA,
    "tiers.redis.password_file": _PASSWORD,
    "tiers.redis.ca_file": _SERVERS_CA,
    "ray.head_redis_ca_file": _SERVERS_CA,
    "worker.session_token_file": "write a long random secret into it, or leave it unset for `kvasir up`",
    "tls.directory": "put ca.pem, router.pem and a worker-POOL.pem for each pool there, or correct the path",
    "tls.ca_file": "write the authorities' PEM certificates into it, or leave tls unset for `kvasir up`",
    "tls.cert_file": "write a PEM certificate chain into it, or leave tls unset for `kvasir up`",
    "tls.key_file": "write the certificate's PEM private key into it, or leave tls unset for `kvasir up`",
}
_FILTER_REMEDIES = {
    "token_file": "write the classifier's token into it, or leave it unset if none is needed",
    "ca_file": "write the PEM certificates that sign the classifier's into it, or correct the path",
}
_TEMPLATE = "model.chat_template"
_SHOWN = 60
_ADAPTER = "name the folder of a PEFT adapter: adapter_config.json and its weights"


def probe_named_files(deployment: Deployment, environment: Mapping[str, str], now: float) -> list[FileProbe]:
    """Check every file that the spec names, except the model's, at `now` (seconds since the epoch)."""
    return [
        *_adapters(deployment),
        *_drafts(deployment),
        *_templates(deployment),
        *_secrets(deployment),
        *_authorities(deployment, now),
        *_sessions(deployment, now),
        *_key_sources(deployment, environment),
        *_edge(deployment, now),
        *_profiles(deployment),
    ]


def file_findings(files: tuple[FileProbe, ...]) -> Iterator[Finding]:
    """Yield one finding for each file."""
    for file in files:
        what = f"{file.field}: {file.path}"
        if file.problem:
            yield Finding("paths", "error", f"{what} {file.problem}", file.remedy or _remedy(file.field))
        elif file.warning:
            yield Finding("paths", "warning", f"{what} {file.warning}", file.remedy)
        else:
            yield Finding("paths", "ok", what)


def _remedy(field: str) -> str:
    if field.endswith(".speculative.model"):
        return "name the folder or Hugging Face id of a draft model with the same tokenizer"
    if field.startswith("output_filters."):
        return _FILTER_REMEDIES[field.rpartition(".")[2]]
    return _REMEDIES.get(field, _ADAPTER)


def _adapters(deployment: Deployment) -> Iterator[FileProbe]:
    """Only real engines read them."""
    for view in deployment.views():
        if not any(pool.engine.kind == "vllm" for pool in view.pools):
            continue
        slots = adapter_slots(view)
        for adapter in view.lora:
            folder, field = Path(adapter.path), f"lora.{adapter.name}.path"
            if folder.is_dir():
                rank = 0 if slots is None else slots.rank
                yield _adapter(FileProbe(field, adapter.path), folder / "adapter_config.json", rank)
            else:
                problem = "is not a folder" if folder.exists() else "does not exist"
                yield FileProbe(field, adapter.path, problem)


def _adapter(probe: FileProbe, path: Path, most: int) -> FileProbe:
    """Check an adapter for engines that reserve memory for ranks up to `most`."""
    if problem := _unreadable(path):
        return replace(probe, problem=problem)
    try:
        settings = read_json_object(path)
    except ConfigError as error:
        return replace(probe, problem=f"cannot be used: {error.message}")
    rank = settings.get("r")
    if isinstance(rank, int) and rank > most:
        problem = f"has rank {rank}, and engines are started for ranks up to {most}"
        return replace(probe, problem=problem, remedy=f"set rank: {rank} beside its path in `lora`")
    return probe


def _drafts(deployment: Deployment) -> Iterator[FileProbe]:
    """Check the models of speculative decoding; nothing is downloaded."""
    for view in deployment.views():
        for pool in view.pools:
            spec = pool.engine.speculative
            if spec is not None and spec.model is not None and pool.engine.kind == "vllm":
                yield _draft(view, spec, f"pools.{pool.name}.engine.speculative.model", spec.model)


def _draft(view: Deployment, spec: SpeculativeSpec, field: str, named: str) -> FileProbe:
    try:
        folder = resolve_model(named, spec.revision, download=False, field=field)
        if spec.method != "draft_model":
            return FileProbe(field, named)
        theirs = _vocabulary(folder)
    except ConfigError as error:
        if error.code != "model_not_cached":
            return FileProbe(field, named, f"cannot be used: {error.message}")
        warning = f"(revision {spec.revision}) is not in the Hugging Face cache"
        return FileProbe(field, named, warning=warning, remedy="the start downloads it first")
    try:
        ours = _vocabulary(resolve_model(view.model.source, view.model.revision, download=False))
    except ConfigError:
        return FileProbe(field, named)  # the check of the model reports it
    if theirs == ours:
        return FileProbe(field, named)
    return FileProbe(
        field, named, f"has a vocabulary of {theirs} tokens, and {view.model.name} one of {ours}"
    )


def _vocabulary(folder: Path) -> object:
    return read_model_config(folder).text.get("vocab_size")


def _templates(deployment: Deployment) -> Iterator[FileProbe]:
    """Check chat templates, and the files that hold them."""
    for view in deployment.views():
        named = view.model.chat_template
        if named is None:
            yield from _own_template(view)
            continue
        shown = named if len(named) <= _SHOWN and "\n" not in named else f"{len(named)} characters"
        try:
            ChatTemplate(configured_template(named) or "", {})
        except ConfigError as error:
            yield FileProbe(_TEMPLATE, shown, f"cannot be used: {error.message}")
        else:
            yield FileProbe(_TEMPLATE, shown)


def _own_template(view: Deployment) -> Iterator[FileProbe]:
    """Yield why the template in the model's folder cannot be used, nothing if it can."""
    try:
        folder = resolve_model(view.model.source, view.model.revision, download=False)
    except ConfigError:
        return  # the check of the model reports it
    try:
        ChatTemplate.from_folder(folder)
    except ConfigError as error:
        remedy = "set model.chat_template to a template that replaces it, or correct it"
        problem = f"comes with a template that cannot be used: {error.message}"
        yield FileProbe(_TEMPLATE, str(folder), problem, remedy=remedy)


def _secrets(deployment: Deployment) -> Iterator[FileProbe]:
    """Check files with a secret that is shared with another process."""
    tiers, limits, tenancy = deployment.tiers.redis, deployment.tenancy.redis, deployment.tenancy
    batches = deployment.gateway.batches.redis
    for field, name in (
        ("tiers.redis.password_file", tiers.password_file if tiers is not None else None),
        ("tenancy.redis.password_file", limits.password_file if limits is not None else None),
        ("gateway.batches.redis.password_file", batches.password_file if batches is not None else None),
        ("worker.session_token_file", deployment.worker.session_token_file),
    ):
        if name is not None:
            yield _secret(field, name, _unreadable(Path(name)))
    if tenancy.cache_secret_file is not None:
        path = Path(tenancy.cache_secret_file)
        problem = _unreadable(path)
        if not problem:
            try:
                cache_secret(path)
            except ConfigError as error:
                problem = f"cannot be used: {error.message}"
        yield _secret("tenancy.cache_secret_file", str(path), problem)
    for each in deployment.output_filters.classifier:
        if each.token_file is not None:
            problem = _unreadable(Path(each.token_file))
            if not problem:
                try:
                    read_token(Path(each.token_file))
                except OSError as error:
                    problem = f"cannot be used: {error}"
            yield _secret(f"output_filters.{each.name}.token_file", each.token_file, problem)


def _secret(field: str, name: str, problem: str) -> FileProbe:
    if not problem and Path(name).stat().st_mode & stat.S_IROTH:
        return FileProbe(
            field,
            name,
            warning="holds a secret, and every user of this machine can read it",
            remedy=f"chmod o-rwx {name}",
        )
    return FileProbe(field, name, problem)


def _authorities(deployment: Deployment, now: float) -> Iterator[FileProbe]:
    """Check the authorities by which other servers are verified."""
    tiers, limits = deployment.tiers.redis, deployment.tenancy.redis
    batches = deployment.gateway.batches.redis
    classifiers = deployment.output_filters.classifier
    for field, name in (
        ("tiers.redis.ca_file", tiers.ca_file if tiers is not None else None),
        ("tenancy.redis.ca_file", limits.ca_file if limits is not None else None),
        ("gateway.batches.redis.ca_file", batches.ca_file if batches is not None else None),
        ("gateway.batches.s3.ca_file", deployment.gateway.batches.s3.ca_file),
        ("ray.head_redis_ca_file", deployment.ray.head_redis_ca_file),
        *((f"output_filters.{each.name}.ca_file", each.ca_file) for each in classifiers),
        *(("gateway.token_issuers.ca_file", each.ca_file) for each in deployment.gateway.token_issuers),
    ):
        if name is not None:
            yield _authority(field, name, now)


def _sessions(deployment: Deployment, now: float) -> Iterator[FileProbe]:
    """Certificates between routers and workers."""
    tls = deployment.tls
    if tls.directory is not None:
        yield _directory(tls.directory, [pool.name for pool in deployment.pools], now)
    if tls.ca_file is not None:
        yield _authority("tls.ca_file", tls.ca_file, now)
    if tls.cert_file is not None:
        yield _certificate("tls.cert_file", tls.cert_file, now)
    if tls.key_file is not None:
        yield _secret("tls.key_file", tls.key_file, _unreadable(Path(tls.key_file)))


def _directory(name: str, pools: list[str], now: float) -> FileProbe:
    """Return the first problem of its files. Files for roles on other machines may be missing."""
    folder = Path(name)
    if not folder.is_dir():
        return FileProbe("tls.directory", name, "is not a folder" if folder.exists() else "does not exist")
    probes = [_authority("", str(folder / CA_FILE), now)]
    own = [folder / ROUTER_FILE, *(folder / worker_file(pool) for pool in pools)]
    probes += [_certificate("", str(path), now) for path in own if path.exists()]
    for probe in sorted(probes, key=lambda each: not each.problem):
        if probe.problem or probe.warning:
            return FileProbe(
                "tls.directory",
                name,
                problem=probe.problem and f"is not good: {Path(probe.path).name} {probe.problem}",
                warning=probe.warning and f"ages: {Path(probe.path).name} {probe.warning}",
                remedy=probe.remedy,
            )
    return FileProbe("tls.directory", name)


def _edge(deployment: Deployment, now: float) -> Iterator[FileProbe]:
    """Check the gateway's TLS files, and whether they are valid now."""
    tls = deployment.gateway.tls
    if tls.cert_file is None or tls.key_file is None:
        return
    cert, key = tls.cert_file, tls.key_file
    of_cert = _certificate("gateway.tls.cert_file", cert, now)
    of_key = _secret("gateway.tls.key_file", key, _unreadable(Path(key)))
    if not (of_cert.problem or of_key.problem):
        problem = certificate_problem(Path(cert), Path(key), None, now)
        if problem:
            of_cert = FileProbe(of_cert.field, cert, f"cannot serve HTTPS: {problem.removeprefix('tls: ')}")
    yield from (of_cert, of_key)
    if tls.client_ca_file is not None:
        yield _authority("gateway.tls.client_ca_file", tls.client_ca_file, now)
    if tls.operator_cert_file is not None:
        yield _certificate("gateway.tls.operator_cert_file", tls.operator_cert_file, now)


def _profiles(deployment: Deployment) -> Iterator[FileProbe]:
    """Read the profile as a router does."""
    if (name := deployment.performance.profile) is not None:
        problem = _unreadable(Path(name))
        try:
            if not problem:
                read_profile(Path(name))
        except ConfigError as error:
            problem = f"cannot be used: {error.message}"
        yield FileProbe("performance.profile", name, problem)


def _key_sources(deployment: Deployment, environment: Mapping[str, str]) -> Iterator[FileProbe]:
    """Check each source of API keys by reading it as the gateway does."""
    tenants = {tenant.name for tenant in deployment.tenancy.all_tenants()}
    fields = ("api_keys_file", "api_keys_dir", "api_keys_env")
    for field in fields:
        if (name := getattr(deployment.gateway, field)) is None:
            continue
        only = deployment.gateway.model_copy(update={**dict.fromkeys(fields), field: name})
        try:
            texts = read_sources(only, environment)
            problem = "" if parse_keys(texts, tenants) else "holds no key"
        except ConfigError as error:
            problem = f"does not serve: {error.message}"
        yield FileProbe(f"gateway.{field}", name, problem)


def _certificate(field: str, name: str, now: float) -> FileProbe:
    """Check a presented certificate: the first of its file counts."""
    return _aged(field, name, now, newest=False)


def _authority(field: str, name: str, now: float) -> FileProbe:
    """Check authorities: in a bundle the one that expires last counts, because the others may be on their way
    out."""
    return _aged(field, name, now, newest=True)


def _aged(field: str, name: str, now: float, *, newest: bool) -> FileProbe:
    path = Path(name)
    if problem := _unreadable(path):
        return FileProbe(field, name, problem)
    try:
        found = certificates_in(path, read_pem(path))
    except ConfigError as error:
        return FileProbe(field, name, f"cannot be used: {error.message.removeprefix('tls: ')}")
    own = max(found, key=_ends) if newest else found[0]
    begins, ends = own.not_valid_before_utc.timestamp(), _ends(own)
    if problem := validity_problem(path, begins, ends, now):
        return FileProbe(field, name, f"is of no use: {problem}")
    if ends - now < min(EXPIRES_SOON_S, (ends - begins) * (1 - _RENEWED_BY)):
        when = datetime.fromtimestamp(ends, UTC).isoformat(timespec="minutes")
        warning = f"expires in {(ends - now) / 86_400:.1f} days, at {when}"
        return FileProbe(field, name, warning=warning, remedy="renew it before that; the file is reloaded")
    return FileProbe(field, name)


def _ends(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _unreadable(path: Path) -> str:
    """Return why `path` cannot be read, "" if it can. Opens nothing, because it may be a pipe."""
    try:
        info = path.stat()
    except OSError as error:
        return f"cannot be read: {path.name}: {error.strerror}"
    if stat.S_ISDIR(info.st_mode):
        return "is a folder"
    if not os.access(path, os.R_OK):
        return f"cannot be read: {path.name}: {os.strerror(errno.EACCES)}"
    return "is empty" if stat.S_ISREG(info.st_mode) and not info.st_size else ""
