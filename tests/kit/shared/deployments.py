"""The deployments by `kvasir up` that tests of one process share, by their spec, one at a time.

Files that share one are a group of the schedule (tests/kit/suite/schedule.py), whose files follow each other.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kit.gateway.chats import MODEL, thinking_model
from tests.kit.stack import ADAPTER, CONTEXT, Stack

from kvasir.config.load.model_files import resolve_model

_SPOKEN = (
    "threads: 1, kv_cache_bytes: 33554432, max_num_seqs: 16, "
    "tool_parser: hermes, reasoning_parser: qwen3, compact_json: true"
)
DEFAULT = f"""
model: {{dtype: float32, max_model_len: {CONTEXT}}}
lora: [{{name: pirate, path: "{ADAPTER}"}}]
lora_loading: {{allow: ["{ADAPTER.parent}", "ADAPTERS"], max_adapters: 2, max_rank: 8}}
pools:
  - {{name: prefill, role: prefill, engine: {{threads: 1}}}}
  - {{name: decode, role: decode, engine: {{threads: 1}}}}
telemetry: {{otlp_endpoint: "COLLECTOR"}}
"""
"""Prefill and decode apart. Float32 and one thread make tokens comparable."""
SEVERAL_MODELS = """
model: {source: kvasir-tiny, dtype: float32}
# By cost, a worker that was late once would get no stream for a minute, and tests wait for streams on each.
routing: {policy: round_robin}
models:
  - {name: second, max_model_len: 512, disaggregation: never}
  - {name: vectors, dtype: float32, max_model_len: 256, matryoshka: true}
pools:
  - {name: prefill, role: prefill, engine: {kind: sim}, cpus: 0.1}
  - {name: decode, role: decode, replicas: 2, engine: {kind: sim, sim: {decode_step_s: 0.02}}, cpus: 0.1}
  - name: second
    role: both
    model: second
    cpus: 0.1
    scaling: {min: 1, max: 3}
    engine:
      kind: sim
      max_num_seqs: 4
      sim: {decode_step_s: 0.03}
  - name: vectors
    role: embed
    model: vectors
    engine: {kv_cache_bytes: 33554432, max_num_seqs: 16, threads: 1}
# Two replicas keep some of eleven clients waiting for longer than that; none is refused for it.
slo: [{name: default, ttft_s: 1, itl_s: 0.2}]
admission: {patience: 0}
scaling: {interval_s: 2, window_s: 6, idle_s: 8, start_s: 5, stale_s: 6}
worker: {drain_s: 3}
"""
"""Two models that generate, simulated and slow, so that a few clients are a load, and a real one that embeds.
The second one's pool scales."""
SPEAKING = f"""
model: {{source: SOURCE, served_name: {MODEL}, dtype: float32, max_model_len: 2048}}
# This policy disaggregates what it can; requests that must run whole on one worker take turns.
disaggregation: auto
routing: {{policy: round_robin}}
worker: {{drain_s: 60}}
models: [{{name: vectors, dtype: float32, max_model_len: 256, matryoshka: true}}]
pools:
  - name: both
    role: both
    cpus: 0.1
    engine: {{tensor_parallel_size: 2, nodes: 2, {_SPOKEN}}}
  - name: decode
    role: decode
    cpus: 0.1
    engine: {{{_SPOKEN}}}
  - {{name: vectors, role: embed, model: vectors, engine: {{kind: sim}}}}
tenancy:
  tenants:
    - {{name: app}}
    - {{name: slow, requests_per_min: 2}}
    - {{name: bound, models: [{MODEL}], max_output_tokens: 8}}
gateway: {{api_keys_file: KEYS_FILE}}
"""
"""Tools, reasoning and tenants with keys, on an engine over two nodes and on one that decodes what the former
prefills. Beside them a model that embeds, which is simulated."""
KEYS = {"app": "sk-app", "slow": "sk-slow", "bound": "sk-bound", "": "sk-operator"}
"""Keys of the tenants of `SPEAKING`, and that of its operator."""
OPERATOR = {"authorization": f"Bearer {KEYS['']}"}


def speaking(folder: Path) -> str:
    """`SPEAKING` with keys and a model, which are made in `folder`."""
    keys = folder / "keys"
    lines = (
        f"{hashlib.sha256(key.encode()).hexdigest()}{f' tenant={tenant}' if tenant else ''}"
        for tenant, key in KEYS.items()
    )
    keys.write_text("\n".join(lines) + "\n")
    keys.chmod(0o600)
    source = thinking_model(resolve_model(MODEL), folder / "model")
    return SPEAKING.replace("KEYS_FILE", str(keys)).replace("SOURCE", str(source))


class StackRegistry:
    """`start` is `kvasir up` in a folder, with arguments; `folder` makes an empty one."""

    def __init__(
        self,
        start: Callable[..., contextlib.AbstractContextManager[Stack]],
        folder: Callable[[], Path],
    ) -> None:
        self._start = start
        self._folder = folder
        self._open = contextlib.ExitStack()
        self._running: tuple[str, Stack] | None = None

    def running(self, spec: str, headers: Mapping[str, str] | None = None) -> Stack:
        """The deployment of this spec, started unless it runs already; another one is stopped before. Its
        pages are asked for with `headers`."""
        if self._running is None or self._running[0] != spec or self._running[1].ended:
            self.stop()
            home = self._folder()
            file = home / "kvasir.yaml"
            file.write_text(spec)
            self._running = (
                spec,
                self._open.enter_context(self._start(home, "-f", str(file), headers=headers)),
            )
        return self._running[1]

    def stop(self) -> None:
        """Stop the one that runs, if any."""
        self._running = None
        self._open.close()
