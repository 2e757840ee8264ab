"""Whether the prefix hit that the router predicts for a request equals the hit that its engine reports.

Starts the product as `kvasir up` does, with real vLLM workers, and replays conversations that share prefixes:
one request at a time, and several sessions concurrently. For every request the prediction in its decision
record is compared with the cached tokens in the answer's usage.

    make bench-parity
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from typing import Any

from load_tests.replays import REPLAYS, Message, Session
from load_tests.report import Row, write
from load_tests.scenarios.foundation import MODEL, ROOT, running_stack

ANSWER_TOKENS = 24
AIM = 0.99
BLOCK = 32

ENGINE = {"block_size": BLOCK, "threads": 1}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "apart": {
        "disaggregation": "always",
        "pools": [
            {"name": "prefill", "role": "prefill", "replicas": 2, "cpus": 0.25, "engine": ENGINE},
            {"name": "decode", "role": "decode", "cpus": 0.25, "engine": ENGINE},
        ],
    },
    # A cache that holds a part of the replay, so that blocks are evicted throughout.
    "whole, evicting": {
        "disaggregation": "never",
        "pools": [
            {
                "name": "both",
                "role": "both",
                "replicas": 2,
                "cpus": 0.25,
                "engine": {**ENGINE, "kv_cache_bytes": 16 << 20},
            }
        ],
    },
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, in tokens, except `kv_state`: the index state of its prefill worker."""

    prompt: int
    predicted: int
    found: int
    kv_state: str

    @property
    def exact(self) -> bool:
        return self.predicted == self.found


class Client:
    """Plain HTTP; each call runs in a thread."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def chat(self, messages: list[Message]) -> tuple[str, Outcome]:
        """Return the answer's text, and the predicted and found tokens. Raise RuntimeError if the router and
        the answer report different hits."""
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await self._json("/v1/chat/completions", body)
        (record,) = (await self._json(f"/decisions/{answer['id']}"))["decisions"]
        usage = answer["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        if record["actual_cached_tokens"] != found:
            raise RuntimeError(
                f"the record says {record['actual_cached_tokens']} and the answer {found}: {record}"
            )
        outcome = Outcome(usage["prompt_tokens"], record["predicted_cached_tokens"], found, _kv_state(record))
        return answer["choices"][0]["message"]["content"], outcome

    async def workers(self) -> list[dict[str, Any]]:
        """The workers of GET /status."""
        found: list[dict[str, Any]] = (await self._json("/status"))["workers"]
        return found

    async def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(self._call, path, body)

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded


def _kv_state(record: dict[str, Any]) -> str:
    places = [place for part in record["parts"] if part["part"] != "decode" for place in part["places"]]
    return next((str(place["kv_state"]) for place in places if place["chosen"]), "unknown")


async def run_session(client: Client, session: Session) -> list[Outcome]:
    """All steps of one session, each after the answer to the previous one."""
    messages: list[Message] = []
    outcomes = []
    for step in session.steps:
        messages += step
        text, outcome = await client.chat(messages)
        messages.append({"role": "assistant", "content": text})
        outcomes.append(outcome)
    return outcomes


async def replay(client: Client, sessions: list[Session], at_once: int) -> list[Outcome]:
    """Run the sessions with that concurrency."""
    gate = asyncio.Semaphore(at_once)

    async def one(session: Session) -> list[Outcome]:
        async with gate:
            return await run_session(client, session)

    return [outcome for outcomes in await asyncio.gather(*map(one, sessions)) for outcome in outcomes]


def rows(label: str, outcomes: list[Outcome], target: float | None = None) -> list[Row]:
    """The fractions of requests and of tokens that are exact."""
    exact = sum(outcome.exact for outcome in outcomes)
    wrong = sum(abs(outcome.predicted - outcome.found) for outcome in outcomes)
    prompt, found = sum(outcome.prompt for outcome in outcomes), sum(outcome.found for outcome in outcomes)
    trusted = sum(outcome.kv_state == "exact" for outcome in outcomes)
    over = sum(max(0, outcome.predicted - outcome.found) for outcome in outcomes)
    note = (
        f"{exact} of {len(outcomes)} requests; {found} of {prompt} prompt tokens found in caches; "
        f"{over} predicted, not found; {wrong - over} found, not predicted; {trusted} decided while EXACT"
    )
    return [
        Row(f"{label}: requests", exact / len(outcomes), "fraction", "higher", target=target, note=note),
        Row(f"{label}: tokens", 1.0 - wrong / prompt, "fraction", "higher", target=target),
    ]


async def measure(address: str, label: str, size: int) -> tuple[list[Row], list[Outcome]]:
    """Every replay, sequential and concurrent; the prompts of each are distinct."""
    client = Client(address)
    made: list[Row] = []
    everything: list[Outcome] = []
    for at_once in (1, 6):
        for number, (name, make) in enumerate(REPLAYS.items()):
            sessions = make(random.Random(100 * at_once + number), size, 6)
            outcomes = await replay(client, sessions, at_once)
            pace = "one at a time" if at_once == 1 else f"{at_once} sessions at once"
            made += rows(f"{label}, {name}, {pace}", outcomes)
            everything += outcomes
            for outcome in outcomes:
                if not outcome.exact:
                    print(f"  not exact: {outcome}", flush=True)
            print(f"  {made[-2].name}: {made[-2].value:.4f} ({made[-2].note})", flush=True)
    for worker in await client.workers():
        kv = worker["kv"]
        print(f"  {worker['worker_id']}: {kv}", flush=True)
        if worker["state"] != "ready" or "differ" in kv["reason"]:
            raise RuntimeError(
                f"{worker['worker_id']} is {worker['state']}: {worker['reason']}{kv['reason']}"
            )
    return made, everything


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sessions", type=int, default=12, help="sessions of each replay, of 6 requests each"
    )
    parser.add_argument("--only", choices=sorted(DEPLOYMENTS), help="one of the deployments")
    args = parser.parse_args()
    made: list[Row] = []
    everything: list[Outcome] = []
    for label, deployment in DEPLOYMENTS.items():
        if args.only in (None, label):
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                json.dump(deployment, file)
                file.flush()
                command = [sys.executable, "-m", "kvasir_platform.cli.main", "up", f"--file={file.name}"]
                with running_stack(ROOT, [*command, "--port=0", "--output=json"]) as stack:
                    some, outcomes = asyncio.run(measure(stack.address, label, args.sessions))
            made += rows(label, outcomes, target=AIM) + some
            everything += outcomes
    path = write("parity", "make bench-parity", rows("all", everything, target=AIM) + made)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
