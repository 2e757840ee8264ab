"""What a user reads of an error of vLLM: texts as vLLM 0.32 writes them."""

from __future__ import annotations

import pytest

from kvasir_workers.engines.vllm.setup.start_causes import StartCause, cause_of, cause_of_end, first_sentence

ENGINE = "pools.serve.engine"
TOO_LITTLE_KV = (
    "To serve at least one request with the model's max seq len (4096), (0.01 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated "
    "maximum model length is 480. Try increasing `gpu_memory_utilization` (which also controls CPU memory "
    "on the CPU backend) or decreasing `max_model_len` when initializing the engine. See "
    "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
UNKNOWN = (
    "1 validation error for ModelConfig\n  Value error, Model architectures ['NovelForCausalLM'] are not "
    "supported for now. Supported architectures: dict_keys(['AfmoeForCausalLM', 'ApertusForCausalLM']) "
    "[type=value_error, input_value=ArgsKwargs((), {'model': ...nderer_num_workers': 1}), "
    "input_type=ArgsKwargs]\n    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)
HEADS = (
    "1 validation error for VllmConfig\n  Value error, Total number of attention heads (8) must be "
    "divisible by tensor parallel size (3). [type=value_error, input_value=ArgsKwargs((), {'model_co... "
    "'shutdown_timeout': 0}), input_type=ArgsKwargs]\n    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)
TOO_LONG = (
    "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (8192) is greater than "
    "the derived max_model_len (max_position_embeddings=4096 or model_max_length=None in model's "
    "config.json). To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. "
    "[type=value_error, input_value=ArgsKwargs((), {'model': ...nderer_num_workers': 1}), "
    "input_type=ArgsKwargs]"
)
RENAMED = (
    "There is no module or parameter named 'nerm' in LlamaModel. The available parameters belonging to  "
    "(LlamaModel) are: {'layers.2.mlp.down_proj.weight', 'embed_tokens.weight'}"
)
NO_MEMORY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
    "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
    "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
BUSY_GPU = (
    "Free memory on device cuda:0 (11.2/79.11 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CUDA_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 "
    "GiB is free. Process 1 has 77.90 GiB memory in use."
)


@pytest.mark.parametrize(
    ("kind", "message", "sentence", "remedy"),
    [
        (
            "ValueError",
            "Model architectures ['Qwen2VLForConditionalGeneration'] failed to be inspected. Please check "
            "the logs for more details.",
            "vLLM cannot import its code of the architecture Qwen2VLForConditionalGeneration, for a reason "
            "that is in the log",
            "if it is torchvision, which the packages for CPUs lack, run the model on a GPU",
        ),
        (
            "ImportError",
            "\nQwen2VLVideoProcessor requires the Torchvision library but it was not found in your "
            "environment. Check out the instructions on the\ninstallation page",
            "Qwen2VLVideoProcessor of the model needs torchvision, which the packages for CPUs lack",
            "run it on a GPU",
        ),
        (
            "NotImplementedError",
            "No MXFP4 MoE backend supports the deployment configuration. weight_key=kMxfp4Static, ",
            "vLLM has no kernel for weights in MXFP4 on this processor",
            "take the model in bfloat16",
        ),
        (
            "ValueError",
            TOO_LITTLE_KV,
            "one request of 4096 tokens needs 0.01 GiB of KV cache, and 0.0 GiB are available",
            "raise pools.serve.engine.kv_cache_bytes (where it is not set, "
            "pools.serve.engine.gpu_memory_utilization), or lower model.max_model_len to at most 480",
        ),
        ("ValueError", NO_MEMORY, "no memory is left for the KV cache", "pools.serve.engine.kv_cache_bytes"),
        (
            "ValidationError",
            UNKNOWN,
            "vLLM does not support the architecture NovelForCausalLM",
            "model.source",
        ),
        (
            "ValidationError",
            HEADS,
            "8 attention heads cannot be divided among 3 tensor-parallel ranks",
            "set pools.serve.engine.tensor_parallel_size to a divisor of 8",
        ),
        (
            "ValidationError",
            TOO_LONG,
            "the model supports 4096 tokens, and max_model_len is 8192",
            "set model.max_model_len to at most 4096",
        ),
        (
            "SafetensorError",
            "Error while deserializing header: incomplete metadata, file not fully covered",
            "a file of weights is damaged or incomplete (Error while deserializing header: incomplete "
            "metadata, file not fully covered)",
            "model.source",
        ),
        ("ValueError", RENAMED, "the weights have a tensor nerm, and LlamaModel does not", "config.json"),
        (
            "ValueError",
            "Following weights were not initialized from checkpoint: {'model.norm.weight'}",
            "the weights lack the tensor model.norm.weight",
            "model.source",
        ),
        ("OutOfMemoryError", CUDA_MEMORY, "memory ran out in the engine", "max_num_batched_tokens"),
        (
            "RuntimeError",
            "Quantization scheme is not supported for the current GPU. Required capability: 90. Current "
            "capability: 80.",
            "the quantization of the model is not supported here: Quantization scheme",
            "model.source",
        ),
    ],
)
def test_an_error_with_a_known_remedy_names_the_field(
    kind: str, message: str, sentence: str, remedy: str
) -> None:
    cause = cause_of(kind, message, ENGINE)
    assert cause.sentence == sentence
    assert remedy in cause.remedy
    assert cause.permanent


@pytest.mark.parametrize("message", [BUSY_GPU, "[Errno 98] Address already in use"])
def test_what_may_change_by_itself_is_not_permanent(message: str) -> None:
    cause = cause_of("ValueError", message, ENGINE)
    assert cause.remedy
    assert not cause.permanent


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ValueError", "The thing is odd. Try another.", StartCause("The thing is odd", permanent=True)),
        ("KeyError", "'lm_head.bias'", StartCause("KeyError: 'lm_head.bias'", permanent=True)),
        ("OSError", "No space left on device", StartCause("OSError: No space left on device")),
        (
            "RuntimeError",
            "NCCL error: unhandled\nsystem error",
            StartCause("NCCL error: unhandled system error"),
        ),
    ],
)
def test_an_unknown_error_keeps_the_first_sentence_of_vllm(
    kind: str, message: str, expected: StartCause
) -> None:
    assert cause_of(kind, message, ENGINE) == expected


def test_a_long_error_is_cut() -> None:
    assert len(first_sentence("x" * 1000)) == 300
    assert first_sentence("see vllm.ai/a. b for more") == "see vllm.ai/a. b for more"


FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): "


@pytest.mark.parametrize(
    ("exited", "out_of_memory", "sentence"),
    [
        ("{}", True, "the kernel ended a process of the engine because memory ran out"),
        ("{'EngineCore': -9}", True, "the kernel ended a process of the engine because memory ran out"),
        ("{'EngineCore': -9}", False, "a process of the engine was ended by SIGKILL"),
        (
            "{'EngineCore_DP0': -11, 'EngineCore_DP1': 1}",
            True,
            "a process of the engine was ended by SIGSEGV",
        ),
        ("{'EngineCore': 1}", True, "a process of the engine ended with exit status 1 and logged no error"),
        ("{}", False, "a process of the engine ended and logged no error"),
    ],
)
def test_a_process_that_ended_without_an_error_is_described_by_how(
    exited: str, out_of_memory: bool, sentence: str
) -> None:
    cause = cause_of_end(FAILED + exited, out_of_memory=out_of_memory, engine=ENGINE)
    assert cause.sentence == sentence
    assert ("kv_cache_bytes" in cause.remedy) is ("memory ran out" in sentence)
