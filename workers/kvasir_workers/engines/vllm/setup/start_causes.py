"""Why vLLM did not start, as one sentence and the field of kvasir.yaml to change. Pure.

vLLM names its own options, which are not those of kvasir.yaml. The table translates the errors that
configurations and models cause; any other error keeps vLLM's first sentence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

_LONGEST = 300
_CLASS = r"(?:[A-Za-z_][\w.]*(?:Error|Exception)): "
_PYDANTIC = re.compile(
    r"\d+ validation errors? for \w+\n.*?(?:Value|Assertion) error, (?P<own>.*?) \[type=", re.S
)
_EXITED = re.compile(r"Failed core proc\(s\): \{[^}]*?: (-?\d+)")
_LASTING = frozenset(
    (
        "AssertionError",
        "AttributeError",
        "ImportError",
        "KeyError",
        "ModuleNotFoundError",
        "NotImplementedError",
        "SafetensorError",
        "TypeError",
        "ValidationError",
        "ValueError",
    )
)
"""Types of exceptions that the same configuration raises again."""


@dataclass(frozen=True, slots=True)
class StartCause:
    """`sentence` is the root error without a full stop, `remedy` what to do about it, "" if unknown.
    `permanent`: another start with the same spec fails in the same way."""

    sentence: str
    remedy: str = ""
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    """`sentence` and `remedy` may use the named groups of `pattern`, and `engine`, the path of the pool's
    engine settings."""

    pattern: str
    sentence: str
    remedy: str
    permanent: bool = True


_RULES = (
    _Rule(
        r"To serve at least one request with the model's max seq len \((?P<length>\d+)\), "
        r"\((?P<needed>\S+) GiB KV cache is needed, which is larger than the available KV cache memory "
        r"\((?P<there>\S+) GiB\)"
        r"(?:\. Based on the available memory, the estimated maximum model length is (?P<fits>\d+))?",
        "one request of {length} tokens needs {needed} GiB of KV cache, and {there} GiB are available",
        "raise {engine}.kv_cache_bytes (where it is not set, {engine}.gpu_memory_utilization), or lower "
        "model.max_model_len{to_fits}",
    ),
    _Rule(
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache",
        "raise {engine}.kv_cache_bytes (where it is not set, {engine}.gpu_memory_utilization); if the "
        "memory is not there, spread the model over more GPUs "
        "({engine}.tensor_parallel_size), or use a smaller or quantized one (model.source)",
    ),
    _Rule(
        r"Model architectures \[(?P<names>[^\]]*)\] are not supported|"
        r"Model architecture (?P<gone>\S+) (?:was supported in vLLM until|is not supported in-tree)",
        "vLLM does not support the architecture {names}{gone}",
        "name a model of another architecture in model.source",
    ),
    _Rule(
        r"(?P<why>Error while deserializing header: [^\n]*|[^\n]*SafetensorError: [^\n]*)",
        "a file of weights is damaged or incomplete ({why})",
        "download the model again, or name another folder in model.source",
    ),
    _Rule(
        r"There is no module or parameter named '(?P<name>[^']+)' in (?P<model>\w+)",
        "the weights have a tensor {name}, and {model} does not",
        "check that config.json and the weights in model.source belong to the same model",
    ),
    _Rule(
        r"Following weights were not initialized from checkpoint: \{'(?P<name>[^']+)'",
        "the weights lack the tensor {name}",
        "check that model.source has all files of the model, and that config.json belongs to them",
    ),
    _Rule(
        r"Cannot find any model weights with",
        "the model's folder has no weights",
        "name a folder with safetensors files in model.source",
    ),
    _Rule(
        r"User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(?P<most>\d+)",
        "the model supports {most} tokens, and max_model_len is {length}",
        "set model.max_model_len to at most {most}",
    ),
    _Rule(
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<ranks>\d+)\)",
        "{heads} attention heads cannot be divided among {ranks} tensor-parallel ranks",
        "set {engine}.tensor_parallel_size to a divisor of {heads}",
    ),
    _Rule(
        r"World size \((?P<ranks>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "the engine needs {ranks} GPUs, and {gpus} are visible to it",
        "lower {engine}.tensor_parallel_size or pipeline_parallel_size, or raise the pool's gpus",
    ),
    _Rule(
        r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup",
        "{free} of {total} GiB of the GPU's memory are free, which is less than the engine may use",
        "stop the other processes on the GPU, or lower {engine}.gpu_memory_utilization",
        permanent=False,
    ),
    _Rule(
        r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)|"
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<bytes>\d+ bytes)|"
        r"(?P<host>Cannot allocate memory)",
        "memory ran out in the engine",
        "lower {engine}.kv_cache_bytes (where it is not set, {engine}.gpu_memory_utilization) or "
        "{engine}.max_num_batched_tokens, spread the model over more GPUs "
        "({engine}.tensor_parallel_size), or use a smaller one (model.source)",
    ),
    _Rule(
        r"max_num_batched_tokens \((?P<batch>\d+)\) is smaller than max_model_len \((?P<length>\d+)\)",
        "without chunked prefill, a step must take a whole request of {length} tokens, and takes {batch}",
        "set {engine}.chunked_prefill to true, or {engine}.max_num_batched_tokens to {length}",
    ),
    _Rule(
        r"Model architectures \[(?P<names>[^\]]*)\] failed to be inspected",
        "vLLM cannot import its code of the architecture {names}, for a reason that is in the log",
        "if it is torchvision, which the packages for CPUs lack, run the model on a GPU, or name another "
        "one in model.source",
    ),
    _Rule(
        r"(?P<what>\w+) requires the Torchvision library",
        "{what} of the model needs torchvision, which the packages for CPUs lack",
        "run it on a GPU, or name another model in model.source",
    ),
    _Rule(
        r"trust_remote_code=True|requires you to execute the configuration file",
        "the model needs code of its own folder",
        "read that code, then set model.trust_remote_code to true",
    ),
    _Rule(
        r"No MXFP4 MoE backend supports the deployment configuration|"
        r"Failed to find a kernel that can implement the MXFP4 linear layer",
        "vLLM has no kernel for weights in MXFP4 on this processor",
        "take the model in bfloat16, or run it on a GPU, or with only its experts in MXFP4 on a CPU with AMX",
    ),
    _Rule(
        r"Unknown quantization method: (?P<method>\w+)|"
        r"The quantization method (?P<old>\S+) is not supported for the current GPU|"
        r"(?P<scheme>Quantization scheme) is not supported for the current GPU",
        "the quantization of the model is not supported here: {method}{old}{scheme}",
        "name weights of another format in model.source",
    ),
    _Rule(
        r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
        "this GPU has no bfloat16",
        "set model.dtype to float16",
    ),
    _Rule(
        r"LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)",
        "an adapter has rank {rank}, and the engine was started for at most {most}",
        "set lora[].rank to the rank in its adapter_config.json",
    ),
    _Rule(
        r"Address already in use|EADDRINUSE",
        "a port of the engine is in use",
        "retry",
        permanent=False,
    ),
)


def cause_of(kind: str, message: str, engine: str) -> StartCause:
    """Return the cause for an exception of type `kind` in a process of vLLM. `engine` is the path of the
    pool's engine settings in kvasir.yaml."""
    inner = _PYDANTIC.search(message)
    text = inner["own"] if inner else message
    for rule in _RULES:
        # SafetensorError is known by its type.
        if found := re.search(rule.pattern, f"{kind}: {text}" if "Safetensor" in kind else text):
            words = _words(found.groupdict(), engine)
            return StartCause(rule.sentence.format_map(words), rule.remedy.format_map(words), rule.permanent)
    named = "" if kind in ("ValueError", "RuntimeError", "Exception", "ValidationError") else f"{kind}: "
    return StartCause(named + first_sentence(text), permanent=kind in _LASTING)


def cause_of_end(front: str, *, out_of_memory: bool, engine: str, printed: str = "") -> StartCause:
    """Return the cause for a process of vLLM that ended without an error of its own. `front` is what vLLM
    then says; `out_of_memory`: the kernel has ended a process of this machine for memory meanwhile;
    `printed` is the last exception on the engine's standard error, "" if unknown."""
    exited = _EXITED.search(front)
    status = int(exited[1]) if exited else None
    if out_of_memory and status in (None, -signal.SIGKILL):
        return StartCause(
            "the kernel ended a process of the engine because memory ran out",
            f"lower {engine}.kv_cache_bytes or the number of replicas, use a smaller model (model.source), "
            "or give the machine or container more memory",
            permanent=True,
        )
    if status is not None and status < 0 and -status in set(signal.Signals):
        return StartCause(f"a process of the engine was ended by {signal.Signals(-status).name}")
    how = "" if status is None else f" with exit status {status}"
    last = f"; the last exception that was printed is {first_sentence(printed)}" if printed else ""
    return StartCause(f"a process of the engine ended{how} and logged no error{last}")


def first_sentence(text: str) -> str:
    """Return the first sentence of an error, on one line and without its full stop."""
    line = " ".join(text.split())
    sentence = re.split(r"(?<=[a-z0-9)'\]}])\. (?=[A-Z])", line, maxsplit=1)[0].rstrip(". ")
    return sentence if len(sentence) <= _LONGEST else sentence[: _LONGEST - 1] + "…"


def _words(groups: Mapping[str, str | None], engine: str) -> dict[str, str]:
    words = {name: (value or "").strip() for name, value in groups.items()} | {"engine": engine}
    words["names"] = words.get("names", "").replace("'", "")
    if "why" in words:
        words["why"] = first_sentence(re.sub(rf"^{_CLASS}", "", words["why"]))
    words["to_fits"] = f" to at most {words['fits']}" if words.get("fits") else ""
    return words
