"""What Kvasir expects of vLLM when an engine does not start: how its processes log, and its words.

These read vLLM's source, because the errors themselves need a start that fails.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from kvasir_workers.engines.vllm.setup.engine_errors import CONFIG_VARIABLE, FATAL, GENERIC

PROCESSES = {"EngineCore": "v1/engine/core.py", "WorkerProc": "v1/executor/multiproc_executor.py"}
PHRASES = {
    "To serve at least one request with the model's max seq len": "v1/core/kv_cache_utils.py",
    "the estimated maximum model length is": "v1/core/kv_cache_utils.py",
    "No available memory for the cache blocks": "v1/core/kv_cache_utils.py",
    "are not supported for now": "model_executor/models/registry.py",
    "There is no module or parameter named": "model_executor/models/utils.py",
    "Following weights were not initialized from": "model_executor/model_loader/default_loader.py",
    "Cannot find any model weights with": "model_executor/model_loader/default_loader.py",
    "User-specified max_model_len": "config/model.py",
    "Total number of attention heads": "config/model.py",
    "Unknown quantization method": "config/model.py",
    "is not supported for the current GPU": "config/vllm.py",
    "is larger than the number of": "config/parallel.py",
    "Free memory on device": "v1/worker/utils.py",
    "trust_remote_code=True": "transformers_utils/config.py",
    "Bfloat16 is only supported on GPUs": "platforms/cuda.py",
    "is greater than max_lora_rank": "lora/peft_helper.py",
}


def source(path: str) -> str:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return (Path(spec.origin).parent / path).read_text()


@pytest.mark.parametrize("text", FATAL)
def test_a_process_logs_the_exception_that_ends_it(text: str) -> None:
    path = next(path for name, path in PROCESSES.items() if text.startswith(name))
    assert f'logger.exception("{text}")' in source(path)


@pytest.mark.parametrize("path", PROCESSES.values())
def test_a_process_is_logging_as_configured_before_it_loads_anything(path: str) -> None:
    text = source(path)
    assert text.index("configure_logging(logging_config)") < text.index("logger.exception(")
    assert f"envs.{CONFIG_VARIABLE}" in source("config/logging.py")


@pytest.mark.parametrize("beginning", GENERIC)
def test_the_front_hides_the_cause_behind_these_words(beginning: str) -> None:
    paths = ("v1/engine/utils.py", "v1/engine/exceptions.py", "v1/executor/multiproc_executor.py")
    assert any(beginning in source(path) for path in paths)


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_errors_that_are_translated_are_worded_as_before(phrase: str) -> None:
    assert phrase in source(PHRASES[phrase])
