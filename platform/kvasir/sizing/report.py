"""The arithmetic of a fit in words, as `kvasir check` prints it."""

from __future__ import annotations

from kvasir.sizing.fit import Fit, Need

GIB = 1 << 30


def gib(size: float) -> str:
    """Return a size in GiB with one decimal."""
    return f"{size / GIB:.1f}"


def terms(weights: int, adapters: int, drafts: int, need: Need) -> str:
    """Return what an engine needs beside KV, with `weights`, slots of `adapters` and weights of `drafts` on
    the rank, in bytes."""
    working = need.working
    parts = [
        f"{gib(weights)} weights",
        *([f"{gib(adapters)} LoRA adapters"] if adapters else []),
        *([f"{gib(drafts)} draft"] if drafts else []),
        f"{gib(working.activations)} activations",
        *([f"{gib(working.graphs)} CUDA graphs"] if working.graphs else []),
        f"{gib(working.libraries)} libraries",
    ]
    return " + ".join(parts)


def describe(fit: Fit, need: Need, gpu: str) -> str:
    """Return one sentence with the arithmetic: that it fits, and the tokens of KV, or by how much it does
    not."""
    memory = fit.memory
    length = f"{need.kv.max_model_len:,}"
    if memory.kv_bytes is None:
        have = f"{gib(memory.budget)} GiB ({memory.utilization:g} of {gib(memory.total)})"
    else:
        have = f"{gib(memory.budget)} GiB (of {gib(memory.total)}, without CUDA's context)"
    spent = terms(fit.weights, fit.adapters, fit.drafts, need)
    if not fit.missing:
        given = "left" if memory.kv_bytes is None else "given"
        kv = f"{gib(fit.kv)} {given} for KV"
        room = f"{fit.tokens:,} tokens, {fit.requests:.1f} requests of {length}"
        return (
            f"fits on {gpu}: {have} = {spent} + {kv}: {room}"
            if need.kv.request_blocks
            else (f"fits on {gpu}: {spent} of {have}")
        )
    asked = "" if memory.kv_bytes is None else f", kv_cache_bytes is {gib(memory.kv_bytes)} GiB"
    short = gib(max(fit.missing, GIB // 10))
    return (
        f"does not fit on {gpu} by {short} GiB: {have} - ({spent}) = {gib(fit.free)} GiB for KV{asked}, and "
        f"one request of {length} tokens needs {fit.request / GIB:.2f} GiB"
    )
