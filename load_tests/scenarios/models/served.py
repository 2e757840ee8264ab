"""A model under `kvasir up`, as a user starts it: a chat, a long prompt twice, and a forced tool call."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.kit.models.architectures import TinyModel

from load_tests.scenarios.models.classified import classifies
from load_tests.scenarios.models.results import Cell

_CAUSE = 400
_PROMPT_TOKENS = 2000
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["sun", "rain"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
}
_WORDS = (
    "the",
    "ship",
    "sails",
    "over",
    "a",
    "blue",
    "sea",
    "to",
    "an",
    "old",
    "town",
    "and",
    "back",
    "home",
)


@dataclass(frozen=True, slots=True)
class Served:
    """What `kvasir up` made of a model."""

    up: Cell
    tools: Cell | None


def serve(model: TinyModel, folder: Path) -> Served:
    """Start a deployment of the model with defaults, use it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="kvm-") as home, contextlib.ExitStack() as stack:
        try:
            url, said = stack.enter_context(_running(model, folder, Path(home)))
        except StartFailed as error:
            return Served(Cell("no", str(error)), None)
        with httpx.Client(base_url=url, timeout=120) as client:
            if model.kind == "embeds":
                return Served(_embeds(client, model), None)
            if model.kind == "classifies":
                return Served(classifies(client, model, folder), None)
            return Served(_generates(client, model, said), _calls_tools(client, model))


class StartFailed(RuntimeError):
    """The deployment did not start; the text says why."""


@contextlib.contextmanager
def _running(model: TinyModel, folder: Path, home: Path) -> Iterator[tuple[str, str]]:
    """A deployment; yields its address, and what was said of the model's KV before the start."""
    # In 32 bits tokens do not depend on how a prompt is divided into steps.
    sets = [f"model.source={folder}", f"name=tiny-{model.name}", f"model.dtype={model.dtype}"]
    arguments = []
    if model.kind != "generates":
        spec = home / "kvasir.yaml"
        # An encoder has no more positions than this.
        positions = model.values["max_position_embeddings"]
        pools = [{"name": "embed", "role": "embed"}]
        spec.write_text(json.dumps({"model": {"max_model_len": positions}, "pools": pools}))
        arguments = ["-f", str(spec)]
    with _up(sets, home, arguments) as found:
        yield found


@contextlib.contextmanager
def running(sets: Sequence[str], home: Path) -> Iterator[str]:
    """A deployment of the embedded spec with the fields `sets`; yields its HOST:PORT. Raises StartFailed."""
    with _up(sets, home, ()) as (url, _):
        yield url.removeprefix("http://")


@contextlib.contextmanager
def _up(sets: Sequence[str], home: Path, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    command = [
        sys.executable,
        "-m",
        "kvasir_platform.cli.main",
        "up",
        "--port",
        "0",
        "-o",
        "json",
        *arguments,
    ]
    command += [word for each in sets for word in ("--set", each)]
    environment = {**os.environ, "KVASIR_HOME": str(home)}
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
        )
    try:
        yield _await_ready(process, home)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def _await_ready(process: subprocess.Popen[str], home: Path) -> tuple[str, str]:
    """Raise StartFailed."""
    said, events = "", []
    for line in process.stdout or ():
        event = json.loads(line)
        events.append(event)
        for finding in event.get("findings", ()):
            if finding["check"] == "kv":
                said = finding["message"]
            if finding["level"] == "error":
                raise StartFailed(f"refused before the start: {finding['message']}; {finding['remedy']}")
        if event.get("event") == "ready":
            return f"http://{event['text']}", said
    raise StartFailed(f"did not start: {failure_of(events) or (home / 'up.log').read_text()[-_CAUSE:]}")


def failure_of(events: Sequence[Mapping[str, Any]]) -> str:
    """Return why a start failed, from what `kvasir up -o json` printed, "" if it does not say. The root error
    comes before the events of the stop, and again as an object of its own at the end."""
    for event in events:
        if isinstance(error := event.get("error"), dict):
            return "; ".join(filter(None, (str(error["message"]), str(error.get("remedy") or ""))))[:_CAUSE]
    return next((str(each["text"]) for each in events if each.get("event") == "failed"), "")[:_CAUSE]


def _generates(client: httpx.Client, model: TinyModel, said: str) -> Cell:
    name = client.get("/v1/models").json()["data"][0]["id"]
    chat = client.post(
        "/v1/chat/completions",
        json={"model": name, "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]},
    )
    notes = [said]
    if chat.status_code != httpx.codes.OK:
        if model.template:
            return Cell("no", f"chat: {chat.status_code}: {_message(chat)}")
        notes.append(f"chat: {_message(chat)}")
    text = _long_text()
    body = {"model": name, "prompt": text, "max_tokens": 8, "temperature": 0.0}
    first, second = (client.post("/v1/completions", json=body) for _ in range(2))
    for answer in (first, second):
        if answer.status_code != httpx.codes.OK:
            return Cell("no", f"completion: {answer.status_code}: {_message(answer)}")
    usage = second.json()["usage"]
    hit = usage["prompt_tokens_details"]["cached_tokens"]
    if not hit:
        return Cell("partly", "; ".join([*filter(None, notes), "no prefix hit at the second time"]))
    if first.json()["choices"][0]["text"] != second.json()["choices"][0]["text"]:
        return Cell("partly", "; ".join([*filter(None, notes), "other text at the second time"]))
    notes.append(f"prefix hit of {hit} of {usage['prompt_tokens']} tokens")
    return Cell("yes", "; ".join(filter(None, notes)))


def _calls_tools(client: httpx.Client, model: TinyModel) -> Cell:
    name = client.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": name,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    answer = client.post("/v1/chat/completions", json=body)
    if answer.status_code != httpx.codes.OK:
        return Cell("no", f"{answer.status_code}: {_message(answer)}")
    calls = answer.json()["choices"][0]["message"].get("tool_calls") or []
    try:
        arguments: dict[str, Any] = json.loads(calls[0]["function"]["arguments"])
    except (IndexError, ValueError):
        return Cell("no", f"no valid call: {json.dumps(calls)[:200]}")
    valid = arguments.get("kind") in ("sun", "rain")
    return Cell("yes") if valid else Cell("no", f"invalid arguments: {arguments}")


def _embeds(client: httpx.Client, model: TinyModel) -> Cell:
    name = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post("/v1/embeddings", json={"model": name, "input": ["a ship", "a town"]})
    if answer.status_code != httpx.codes.OK:
        return Cell("no", f"embeddings: {answer.status_code}: {_message(answer)}")
    vectors = answer.json()["data"]
    size = len(vectors[0]["embedding"])
    return Cell("yes", f"{len(vectors)} embeddings of {size} dimensions")


def _long_text() -> str:
    """Text of about 2,000 tokens: some words are two."""
    rng = random.Random(3)
    return " ".join(rng.choice(_WORDS) for _ in range(_PROMPT_TOKENS))


def _message(answer: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])[:300]
    return answer.text[:300]
