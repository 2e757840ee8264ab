"""Secrets and dependencies: no secret of clients or operators is in logs, answers, pages, decision records,
arguments, environments or the repository, and every installed dependency is pinned."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, Layout

from kvasir.config.spec.deployment import WorkerSpec
from load_tests.scenarios.scorecard.clients.http_cases import CASES, read_answer
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, engine, exercise, split

PROMISE = "none"
ROOT = Path(__file__).resolve().parents[4]
_MAX_FILE = 1 << 20
_PATIENCE_S = 20.0

PATTERNS = {
    "private key": re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}"),
    "key of a cloud": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "token of a forge": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|glpat-[A-Za-z0-9_-]{20})\b"),
    "key of a model service": re.compile(r"\bsk-(?:proj-|ant-)?[A-Za-z0-9]{32,}\b"),
    "token of a hub": re.compile(r"\bhf_[A-Za-z0-9]{34}\b"),
    "password in a URL": re.compile(r"\b[a-z]+://[^\s/:@{}$]+:[^\s/:@{}$]{6,}@[a-z0-9.-]+\.[a-z]{2,}"),
}
_PIN = re.compile(r"^[A-Za-z0-9._-]+==\S+", re.MULTILINE)
_ENTRY = re.compile(r"^[A-Za-z0-9._-]+==(?:[^\n]*\\\n)+?\s+--hash=sha256:[0-9a-f]{64}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Size:
    """`requests` that carry secrets, in addition to all malformed ones."""

    requests: int = 60


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    rng = trial.rng(1)
    token, key, salt, prompt, user = (f"canary-{kind}-{rng.getrandbits(96):024x}" for kind in "tkspu")
    secrets = {"session token": token, "API key": key, "salt": salt, "prompt": prompt, "user": user}
    file = trial.folder / "session-token"
    file.write_text(token)
    spec = engine(sim={"decode_step_s": 0.002})
    worker = WorkerSpec(session_token_file=str(file))
    reported: dict[str, str] = {}
    async with exercise(
        trial, split(spec, spec, worker=worker), Layout({"prefill": 1, "decode": 1})
    ) as fleet:
        served = await _talk(fleet, rng, size, secrets, reported)
        reported |= _processes(fleet)
        reported["/status"] = json.dumps(await gateway.status(fleet.address))
        reported["/metrics"] = (await gateway.get(fleet.address, "/metrics")).decode()
    if served < size.requests // 2:
        raise NotProven(f"only {served} of {size.requests} requests were served")
    logs = [path for path in trial.folder.rglob("*") if path.is_file() and path != file]
    for path in logs:
        reported[f"file {path.name}"] = path.read_text(errors="replace")
    leaks = [
        f"{kind} in {where}" for where, text in reported.items() for kind, s in secrets.items() if s in text
    ]
    tracked = _tracked()
    found = [f"{kind} in {path}" for path, text in tracked for kind in _secrets_in(text)]
    loose = _unpinned(sorted((ROOT / "requirements").glob("*.lock")))
    return [
        Figure("secrets where others can read them", len(leaks), "findings", "lower", 0.0,
               f"{len(reported)} places: {len(logs)} files, pages, answers, decision records, arguments and "
               f"environments; {', '.join(leaks)[:200] or 'none'}"),
        Figure("secrets in the repository", len(found), "findings", "lower", 0.0,
               f"{len(tracked)} files; {', '.join(found)[:200] or 'none'}"),
        Figure("locked packages without a hash", len(loose), "packages", "lower", 0.0,
               ", ".join(loose)[:200]),
    ]  # fmt: skip


async def _talk(
    fleet: Fleet, rng: Random, size: Size, secrets: dict[str, str], reported: dict[str, str]
) -> int:
    """Send secrets through every channel and record all output; return how many requests were served."""
    host, _, port = fleet.address.rpartition(":")
    head = f"Host: t\r\nAuthorization: Bearer {secrets['API key']}\r\n"
    served = 0
    for number in range(size.requests):
        body = {
            "model": "kvasir-tiny",
            "prompt": f"{secrets['prompt']} {rng.random()}",
            "max_tokens": 2 + number % 5,
            "cache_salt": secrets["salt"],
            "user": secrets["user"],
            "stream": bool(number % 2),
        }
        if number % 5 == 4:
            body["temperature"] = secrets["prompt"]
        data = json.dumps(body).encode()
        sent = f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        status, request_id, text = await _ask(host, int(port), sent)
        reported[f"answer {number}"] = text
        if status == 200:
            served += 1
            record = await gateway.get(fleet.address, f"/decisions/{request_id}")
            reported[f"decision {number}"] = record.decode()
    for case in CASES:
        sent = case.data.replace(b"Host: t\r\n", head.encode(), 1)
        _, _, reported[f"answer to {case.name}"] = await _ask(host, int(port), sent)
    return served


async def _ask(host: str, port: int, data: bytes) -> tuple[int, str, str]:
    """Status, request id and text of an answer; 0 and empty if there is none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            writer.write(data)
            answer = await read_answer(reader, head=data.startswith(b"HEAD"))
            return answer.status, answer.request_id, answer.body.decode(errors="replace")
    except (EOFError, ConnectionError):
        return 0, "", ""
    finally:
        writer.close()


def _processes(fleet: Fleet) -> dict[str, str]:
    """What other users of the machine, or the same user, can read of the fleet's processes."""
    return {
        f"{what} of {name}": Path(f"/proc/{pid}/{file}").read_bytes().decode("latin-1")
        for name, pid in fleet.pids().items()
        for what, file in (("arguments", "cmdline"), ("environment", "environ"))
    }


def _tracked() -> list[tuple[str, str]]:
    """The repository's text files. Raise NotProven if this is not a repository."""
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = [name for name in run.stdout.decode().split("\0") if name]
    if not names:
        raise NotProven("git lists no files here")
    files = [(name, ROOT / name) for name in names]
    return [
        (name, path.read_text(errors="replace"))
        for name, path in files
        if path.is_file() and path.stat().st_size <= _MAX_FILE
    ]


def _secrets_in(text: str) -> Iterable[str]:
    return [kind for kind, pattern in PATTERNS.items() if pattern.search(text)]


def _unpinned(locks: Sequence[Path]) -> list[str]:
    """Locked packages without a hash."""
    if not locks:
        raise NotProven("there is no lock file")
    loose = []
    for lock in locks:
        text = lock.read_text(encoding="utf-8")
        hashed = {match[0].split("==")[0] for match in _ENTRY.finditer(text)}
        loose += [f"{pin} in {lock.name}" for pin in _PIN.findall(text) if pin.split("==")[0] not in hashed]
    return loose
