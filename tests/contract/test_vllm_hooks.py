"""Internals of vLLM that Kvasir depends on without a guarantee: one test per hook.

When vLLM moves, these fail first and say which of our modules must follow.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.media.image_files import png

from kvasir.config.spec.deployment import Deployment, LoraSpec, PoolSpec, SpeculativeSpec
from kvasir.core.media.prompts import MediaKind, PromptMedia, media_key
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Role, Sampling, token_ids
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments, environment

pytestmark = pytest.mark.slow


def names(kind: Any) -> set[str]:
    """Attributes of an instance of a dataclass, a struct or a plain class."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(vars(kind())) | set(getattr(kind, "__annotations__", {}))


def must_have(kind: Any, wanted: set[str], reader: str) -> None:
    missing = wanted - names(kind)
    assert not missing, f"vllm's {kind.__name__} lost {sorted(missing)}, which {reader} reads"


@pytest.fixture
def processor(runtime: Any) -> Any:
    from vllm.v1.engine.output_processor import OutputProcessor

    return OutputProcessor(None, log_stats=False)


@pytest.fixture
def tapped(processor: Any) -> tuple[str, list[Any]]:
    """A request in vLLM's output processor whose collector's `put` was replaced, as engine.py does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

    values = dict.fromkeys(inspect.signature(EngineCoreRequest).parameters)
    values.update(
        request_id="r-1",
        external_req_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, max_tokens=4),
        arrival_time=0.0,
        resumable=False,
    )
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r-1")
    seen: list[Any] = []
    collector.put = seen.append
    processor.add_request(EngineCoreRequest(**values), None, None, 0, collector)
    return "r-1", seen


def core_output(request_id: str, tokens: list[int], finish: Any = None) -> Any:
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(request_id=request_id, new_token_ids=tokens, finish_reason=finish)


def test_every_output_goes_through_the_collectors_put(processor: Any, tapped: tuple[str, list[Any]]) -> None:
    request_id, seen = tapped
    processor.process_outputs([core_output(request_id, [7])])
    processor.process_outputs([core_output(request_id, [8, 9])])
    assert [list(output.outputs[0].token_ids) for output in seen] == [[7], [8, 9]], (
        "vLLM no longer hands each output to `RequestOutputCollector.put` on the instance; "
        "engine.py:_deliver is never called"
    )


def test_an_abort_by_internal_id_puts_a_finished_output(
    processor: Any, tapped: tuple[str, list[Any]]
) -> None:
    request_id, seen = tapped
    processor.abort_requests([request_id], internal=True)
    assert [(output.finished, output.outputs[0].finish_reason) for output in seen] == [(True, "abort")], (
        "vLLM no longer answers an abort with a finished output; engine.py would never end the stream"
    )


def test_a_dead_engine_puts_its_exception(processor: Any, tapped: tuple[str, list[Any]]) -> None:
    error = RuntimeError("dead")
    processor.propagate_error(error)
    assert tapped[1] == [error], "vLLM no longer puts the core's exception; live streams would hang"


def test_a_new_collector_is_empty_and_names_its_request(runtime: Any) -> None:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r-1")
    assert (collector.output, collector.request_id) == (None, "r-1"), (
        "RequestOutputCollector changed `output` or `request_id`, which engine.py:_admit reads"
    )


def test_the_client_keeps_the_methods_that_the_adapter_calls(runtime: Any) -> None:
    llm = runtime.AsyncLLM
    wanted = {
        "add_request": {"request_id", "prompt", "params", "lora_request", "priority", "data_parallel_rank"},
        "abort": {"request_id", "internal"},
        "collective_rpc": {"method", "args"},
        "reset_prefix_cache": set(),
        "add_lora": {"lora_request"},
        "shutdown": set(),
    }
    for method, parameters in wanted.items():
        have = set(inspect.signature(getattr(llm, method)).parameters)
        assert parameters <= have, f"AsyncLLM.{method} lost {sorted(parameters - have)}"
    source = inspect.getsource(llm)
    for attribute in ("self.output_handler", "self.logger_manager", "self.engine_core", "def dead_error"):
        assert attribute in source, f"AsyncLLM lost `{attribute}`, which the adapter reads"


def test_the_clients_zmq_context_can_be_closed(runtime: Any) -> None:
    from vllm.v1.engine.core_client import BackgroundResources

    assert "ctx" in BackgroundResources.__annotations__, (
        "BackgroundResources lost `ctx`, which runtime.py:shut_down closes"
    )


def test_our_recorder_is_the_only_logger(runtime: Any) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    manager = StatLoggerManager(
        vllm_config=SimpleNamespace(),
        engine_idxs=[0, 1],
        custom_stat_loggers=[runtime.LoadRecorder],
        enable_default_loggers=False,
    )
    assert [type(logger) for logger in manager.stat_loggers] == [runtime.LoadRecorder], (
        "vLLM adds a logger of its own beside load.py:LoadRecorder; its work would be paid for every step"
    )
    assert runtime.recorder(SimpleNamespace(logger_manager=manager)) is manager.stat_loggers[0]


def test_the_recorder_takes_vllms_statistics(runtime: Any) -> None:
    from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    speculation = SpecDecodingStats.new(4)
    speculation.observe_draft(4, 3)
    stats = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=100, hits=64),
        spec_decoding_stats=speculation,
        kv_connector_stats={"kvasir_transfer_bytes_received": 9, "kvasir_kv_blocks_leased": 5},
    )
    iteration = IterationStats()
    iteration.num_preempted_reqs = 1
    recorder = runtime.LoadRecorder(None, [0, 1])
    for _ in range(2):
        recorder.record(scheduler_stats=stats, iteration_stats=iteration, mm_cache_stats=None, engine_idx=1)
    load = recorder.newest(kv_blocks_total=7, idle=False)
    assert (load.running, load.waiting, load.kv_usage, load.kv_blocks_leased) == (3, 3, 0.25, 5)
    assert (load.prefix_queries_tokens, load.prefix_hits_tokens) == (200, 128)
    assert (load.speculated_tokens, load.accepted_tokens, load.preemptions) == (8, 6, 2)
    assert (load.transfer_bytes_received, load.kv_blocks_total) == (18, 7)
    idle = recorder.newest(kv_blocks_total=7, idle=True)
    assert (idle.running, idle.waiting, idle.kv_usage, idle.prefix_hits_tokens) == (0, 0, 0.0, 128)


def test_kv_that_is_offered_early_comes_with_the_statistics_of_its_step(runtime: Any) -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    offers: list[Any] = []
    recorder = runtime.LoadRecorder(None, [0])
    recorder.on_early_handoff = offers.append
    recorder.record(scheduler_stats=SchedulerStats())
    early = {"kvasir_early_handoffs": {"r-01234567": {"lease_id": "l"}}}
    recorder.record(scheduler_stats=SchedulerStats(kv_connector_stats=early))
    assert offers == [{"lease_id": "l"}]


def test_outputs_carry_what_a_stream_reads(runtime: Any) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import FINISH_REASON_STRINGS
    from vllm.v1.metrics.stats import RequestStateStats

    from kvasir_workers.engines.vllm.output import stream

    parameters = set(inspect.signature(RequestOutput.__init__).parameters)
    wanted = {"outputs", "finished", "num_cached_tokens", "kv_transfer_params", "metrics"}
    assert wanted <= parameters, f"RequestOutput lost {sorted(wanted - parameters)}, which stream.py reads"
    must_have(
        CompletionOutput,
        {"index", "text", "token_ids", "logprobs", "finish_reason", "stop_reason"},
        "stream.py",
    )
    must_have(
        RequestStateStats, {"queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"}, "stream.py"
    )
    assert set(FINISH_REASON_STRINGS) == set(stream._FINISH), "vLLM knows another finish reason"


def test_the_worker_has_no_attribute_of_our_extensions_names(runtime: Any) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from kvasir_workers.engines.vllm.runtime.transfer_extension import TransferEngineExtension

    ours = {name for name in dir(TransferEngineExtension) if not name.startswith("__")}
    clash = {name for name in ours if hasattr(CPUWorker, name)}
    assert ours, "the extension has no methods"
    assert not clash, f"vLLM's worker has {sorted(clash)} itself and would refuse the extension"


def test_the_model_runner_keeps_its_kv_where_the_extension_looks(runtime: Any) -> None:
    from vllm.v1.worker import gpu_model_runner

    source = inspect.getsource(gpu_model_runner)
    for attribute in ("self.kv_cache_config = ", "self.kv_caches: "):
        assert attribute in source, f"the model runner lost `{attribute}`; worker_extension.py reads it"


def test_vllm_knows_every_argument_and_variable_that_we_set(runtime: Any) -> None:
    from vllm import envs
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    base = Deployment()
    engine = base.pools[1].engine.model_copy(
        update={"speculative": SpeculativeSpec(), "tensor_parallel_size": 2}
    )
    pool = PoolSpec(name="decode", role=Role.DECODE, engine=engine)
    deployment = base.model_copy(update={"lora": (LoraSpec(name="a", path="/a"),)})
    arguments = engine_arguments(deployment, pool, model_path="/m", platform="cpu", media=[MediaKind.IMAGE])
    unknown = set(arguments) - set(inspect.signature(AsyncEngineArgs).parameters)
    assert not unknown, f"AsyncEngineArgs no longer takes {sorted(unknown)}; see arguments.py"
    KVTransferConfig(**arguments["kv_transfer_config"])
    variables = environment(deployment, pool, cpus=1, platform="cpu")
    ours = {name for name in variables if name.startswith("VLLM_")}
    gone = ours - set(envs.environment_variables)
    assert not gone, f"vLLM no longer reads {sorted(gone)}; see arguments.py"


def test_a_leg_becomes_sampling_parameters(runtime: Any) -> None:
    sampling = Sampling(
        max_tokens=9,
        top_k=3,
        n=2,
        seed=4,
        stop=("x",),
        stop_token_ids=(5,),
        logit_bias=((6, 1.5),),
        logprobs=2,
    )
    terms = {"lease_id": "l", "fence": 1, "lease_s": 2.0}
    full = runtime.sampling_params(EngineRequest("r", token_ids([1]), sampling), **terms)
    assert (full.n, full.max_tokens, full.top_k, full.seed, full.stop) == (2, 9, 3, 4, ["x"])
    assert (full.logit_bias, full.logprobs, full.extra_args) == ({6: 1.5}, 2, None)
    prefill = runtime.sampling_params(EngineRequest("r", token_ids([1]), sampling, leg=Leg.PREFILL), **terms)
    assert (prefill.n, prefill.max_tokens, prefill.logprobs) == (1, 1, None)
    assert prefill.extra_args == {
        "kv_transfer_params": {"offer": {"lease_id": "l", "fence": 1, "ttl_s": 2.0}}
    }
    handoff = KvHandoff("l", 1, 2.0, 3, b"t")
    decode = runtime.sampling_params(
        EngineRequest("r", token_ids([1]), sampling, leg=Leg.DECODE, handoff=handoff), **terms
    )
    assert decode.extra_args["kv_transfer_params"]["pull"]["ticket"] == "t"
    hinted = EngineRequest("r", token_ids([1]), sampling, tier_tokens=64)
    assert runtime.sampling_params(hinted, **terms).extra_args == {"kv_transfer_params": {"tier_tokens": 64}}


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 2.0}, {"n": 0}, {"max_tokens": 0}])
def test_bad_values_raise_what_the_adapter_refuses(runtime: Any, bad: dict[str, Any]) -> None:
    request = EngineRequest("r", token_ids([1]), Sampling(**bad))
    with pytest.raises(runtime.REFUSED):
        runtime.sampling_params(request, lease_id="l", fence=1, lease_s=1.0)


def test_a_prompt_is_handed_over_as_tokens(runtime: Any) -> None:
    made = runtime.prompt(EngineRequest("r", token_ids([3, 4]), Sampling(), salt="s"))
    assert made == {"type": "token", "prompt_token_ids": [3, 4], "cache_salt": "s"}, (
        "vLLM's form of a tokenized prompt changed; it would be tokenized again, in a thread"
    )


def test_importing_the_adapter_does_not_import_vllm() -> None:
    import subprocess

    code = "import sys, kvasir_workers.engines.vllm.engine; sys.exit('vllm' in sys.modules)"
    environment_ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment_, check=False).returncode == 0, (
        "vLLM would be imported before its environment is set"
    )


def test_rows_of_a_prompt_need_no_adapter_of_their_own(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """engines/vllm/runtime/adapter_logits.py is to go when vLLM's kernels no longer fail here."""
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from kvasir_workers.engines.vllm.runtime.adapter_logits import serve_prompt_rows

    kernels = PunicaWrapperCPU(16, 4, "cpu")
    kernels.indices_len[1] = 2
    kernels._sampler_indices[:2] = torch.tensor([0, 1])
    first, second = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 11, 4)

    def share(rows: int) -> Any:
        added = torch.zeros(rows, 11)
        kernels.add_lora_logits(added, torch.ones(rows, 8), first, second, 1.0)
        return added

    sampled = share(2)
    assert sampled.abs().sum() > 0
    with pytest.raises(RuntimeError, match="subscript b"):
        share(5)
    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_logits", PunicaWrapperCPU.add_lora_logits)
    serve_prompt_rows()
    serve_prompt_rows()
    assert torch.equal(share(2), sampled)
    assert torch.equal(share(5), torch.zeros(5, 11))


def test_a_prompt_with_images_is_made_by_the_clients_renderer(runtime: Any) -> None:
    from vllm.inputs import TokensPrompt
    from vllm.renderers.base import BaseRenderer

    assert "self.renderer = " in inspect.getsource(runtime.AsyncLLM.__init__), (
        "AsyncLLM lost `renderer`, which media_prompts.py calls"
    )
    parameters = list(inspect.signature(BaseRenderer.process_for_engine_async).parameters)
    assert parameters[1:3] == ["prompt", "arrival_time"], "media_prompts.py passes these two in this order"
    wanted = {"prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "cache_salt"}
    lost = wanted - set(TokensPrompt.__annotations__)
    assert not lost, f"vLLM's TokensPrompt lost {sorted(lost)}, which media_prompts.py sets"


def test_an_image_is_decoded_if_its_pixels_are_within_the_variable(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.multimodal.media import ImageMediaIO

    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "100")
    decode = ImageMediaIO().load_bytes
    assert decode(png(10, 10)).media.mode == "RGB"
    with pytest.raises(ValueError, match="exceed the maximum of 100 pixels"):
        decode(png(11, 10))
    with pytest.raises(ValueError, match="load image"):
        decode(b"MZ")


def test_the_key_that_is_given_for_an_image_identifies_it(runtime: Any) -> None:
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    key = PromptMedia(0, 1, b"digest", b"data").key("salt")
    items = {"image": SimpleNamespace(get_all_items_for_hash=lambda: [b"pixels"])}
    made = ProcessorInputs(prompt=[1], mm_data_items=items, mm_uuid_items={"image": [key]})
    assert made.get_mm_hashes("m", "sha256") == {"image": [key]}, (
        "vLLM identifies an image otherwise than by its `multi_modal_uuids`; blocks get other names"
    )
    encoder_has_adapters = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=True))
    adapter = SimpleNamespace(lora_name="ad")
    for lora, identifier in ((None, key), (adapter, f"ad:{key}")):
        assert InputProcessor._get_mm_identifier(encoder_has_adapters, key, lora) == identifier
        assert media_key(identifier) == key


def test_vllm_ships_the_bindings_of_gpus_that_are_read(runtime: Any) -> None:
    from vllm.utils.import_utils import import_pynvml

    from kvasir_workers.engines.vllm import gpu_counters

    nvml = import_pynvml()
    named = set(re.findall(r"nvml\.(\w+)", inspect.getsource(gpu_counters)))
    assert len(named) > 10, "gpu_counters.py does not call its bindings `nvml`"
    gone = {name for name in named if not hasattr(nvml, name)}
    assert not gone, f"vLLM's pynvml lost {sorted(gone)}, which gpu_counters.py uses"
    asked = nvml.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2"} <= set(dir(asked))
    assert {"metricId", "nvmlReturn", "value"} <= set(dir(asked.metrics[1]))


def test_a_pair_of_texts_is_classified_with_the_place_of_the_second(runtime: Any) -> None:
    from vllm import PoolingParams
    from vllm.v1.worker import gpu_model_runner

    change = {"compressed_token_type_ids": 3}
    assert PoolingParams(task="classify", extra_kwargs=change).extra_kwargs == change
    assert 'extra_kwargs.get("compressed_token_type_ids")' in inspect.getsource(gpu_model_runner), (
        "vLLM's runner reads the types of tokens otherwise than embedding_runtime.py:add tells them"
    )
