"""The table of vLLM's arguments, and what vLLM makes of them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tests.kit import vllm_arguments

from kvasir.checkpoint.sampling_defaults import sampling_defaults
from kvasir.config.checks import vllm_args
from kvasir.config.checks.kv_dtypes import REFUSED, SERVED, KvDtype
from kvasir.config.checks.quantization import AT_LOAD, ENGINE_METHODS
from kvasir.config.checks.vllm_args import VllmArgs
from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    LoadSpec,
    ModelSpec,
    PoolSpec,
    SpeculativeSpec,
)
from kvasir.core.requests import Role
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments

MODEL = str(resolve_model("kvasir-tiny"))
pytestmark = pytest.mark.slow


def test_the_table_has_the_arguments_and_types_of_the_installed_vllm() -> None:
    names = {**vars(vllm_args)}
    wanted = {name: eval(kind, names) for name, kind in vllm_arguments.fields().items()}
    assert get_type_hints(VllmArgs) == wanted


def test_the_methods_of_quantization_are_those_of_the_installed_vllm() -> None:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    from vllm.model_executor.layers import quantization

    # `online` is for engine.args.quantization_config, which needs no method.
    online = set(ONLINE_QUANT_SHORTHAND_NAMES) - {"online"}
    left_out = {*quantization.DEPRECATED_QUANTIZATION_METHODS, "online"}
    assert set(ENGINE_METHODS) == {*quantization.QUANTIZATION_METHODS, *online} - left_out
    assert set(AT_LOAD) == online | {"fp8", "experts_int8"}


def test_each_kv_dtype_of_the_installed_vllm_is_served_or_refused_with_a_reason() -> None:
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    names = set(get_args(CacheDType))
    assert {*SERVED, *REFUSED} == names
    assert set(get_args(KvDtype)) == set(SERVED) == set(CPUAttentionBackend.supported_kv_cache_dtypes)
    assert not set(SERVED) & set(REFUSED)


def test_vllm_reads_the_schedule_of_speculation() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    steps = [{"batch": 1, "tokens": 3}, {"batch": 2, "tokens": 1}, {"batch": 4, "tokens": 0}]
    spec = SpeculativeSpec.model_validate({"tokens": 3, "schedule": steps})
    made = speculative_config(spec, MODEL)
    schedule = made.num_speculative_tokens_per_batch_size
    assert build_dynamic_sd_schedule_lookup(schedule, 6, 3)[1:] == [3, 1, 1, 0, 0, 0]


def test_sampling_defaults_are_what_vllm_reads_from_the_model(tmp_path: Path) -> None:
    from vllm.transformers_utils.config import try_get_generation_config

    stated = {"temperature": 0.6, "top_p": 1.0, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.05}
    folder = with_config(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(stated | {"do_sample": True, "typical_p": 1.0}))
    theirs = try_get_generation_config(str(folder), trust_remote_code=False).to_diff_dict()
    ours = dataclasses.asdict(sampling_defaults(folder))
    assert {name: ours[name] for name in stated} == {name: theirs[name] for name in stated} == stated


CONFIGS: dict[str, dict[str, Any]] = {
    "attention_config": {"backend": "CPU_ATTN"},
    "compilation_config": {"cudagraph_mode": "FULL"},
    "kernel_config": {"moe_backend": "triton"},
    "pooler_config": {"seq_pooling_type": "MEAN"},
    "profiler_config": {},
    "reasoning_config": {},
    "logging_config": {},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mapping_becomes_the_configuration_of_that_name(name: str) -> None:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    made = getattr(engine_args({"model": MODEL, name: CONFIGS[name]}), name)
    assert dataclasses.is_dataclass(made)


def test_every_mode_of_cuda_graphs_and_compilation_on_the_page_is_vllms() -> None:
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    page = (Path(__file__).parents[2] / "docs" / "ENGINE.md").read_text()
    (listed,) = re.findall(r"cudagraph_mode: (NONE [^}]*)}", page)
    assert "`compilation_config: {mode: 0 to 3}`" in page
    graphs = listed.replace("\\", "").split(" | ")
    assert set(graphs) == set(CUDAGraphMode.__members__)
    for graph in graphs:
        made = engine_args({"model": MODEL, "compilation_config": {"cudagraph_mode": graph}})
        assert made.compilation_config.cudagraph_mode is CUDAGraphMode[graph]
    for mode in range(4):
        made = engine_args({"model": MODEL, "compilation_config": {"mode": mode}})
        assert made.compilation_config.mode is CompilationMode(mode)


def test_a_configuration_with_an_unknown_field_is_refused() -> None:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    with pytest.raises((TypeError, ValueError), match="cudagraf"):
        engine_args({"model": MODEL, "compilation_config": {"cudagraf": 1}})


LOADS: dict[str, tuple[LoadSpec, dict[str, Any]]] = {
    "prefetch": (
        LoadSpec(strategy="prefetch", threads=3),
        {
            "load_format": "auto",
            "safetensors_load_strategy": "prefetch",
            "safetensors_prefetch_num_threads": 3,
        },
    ),
    "lazy": (
        LoadSpec(format="safetensors", strategy="lazy"),
        {"load_format": "safetensors", "safetensors_load_strategy": "lazy"},
    ),
    "eager": (LoadSpec(strategy="eager"), {"safetensors_load_strategy": "eager"}),
    "auto": (LoadSpec(), {"load_format": "auto", "safetensors_load_strategy": None}),
    "streamed": (
        LoadSpec(format="runai_streamer", threads=5),
        {"load_format": "runai_streamer", "model_loader_extra_config": {"concurrency": 5}},
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_vllm_parses_how_weights_are_read(name: str) -> None:
    from vllm.model_executor.model_loader import get_model_loader

    load, wanted = LOADS[name]
    made = load_config(ModelSpec(source=MODEL, load=load))
    assert {field: getattr(made, field) for field in wanted} == wanted
    assert get_model_loader(made) is not None


def test_vllm_streams_weights_from_object_storage_beside_a_local_configuration() -> None:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    source = "s3://bucket/model"
    deployment = one_pool(ModelSpec(source=source, max_model_len=256))
    arguments = engine_arguments(deployment, deployment.pools[0], model_path=MODEL, platform="cpu")
    made = engine_args(arguments).create_engine_config()
    assert (made.model_config.model, made.model_config.model_weights) == (MODEL, source)
    assert made.load_config.load_format == "runai_streamer"


def load_config(model: ModelSpec) -> Any:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    deployment = one_pool(model)
    arguments = engine_arguments(deployment, deployment.pools[0], model_path=MODEL, platform="cpu")
    return engine_args(arguments).create_load_config()


def one_pool(model: ModelSpec) -> Deployment:
    pool = PoolSpec(name="both", role=Role.BOTH)
    return Deployment(disaggregation="never", pools=(pool,), model=model)


DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "eagle": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 128,
    },
}
"""What a draft's config.json has beside or instead of the model's."""
MTP = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def with_config(folder: Path, **changes: Any) -> Path:
    """A copy of the shipped model that declares something else."""
    for file in Path(MODEL).glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def speculative_config(spec: SpeculativeSpec, model: str) -> Any:
    """What vLLM makes of it, up to where it would load weights."""
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    pool = PoolSpec(name="both", role=Role.BOTH, engine=EngineSpec(speculative=spec))
    deployment = Deployment(disaggregation="never", pools=(pool,), model=ModelSpec(max_model_len=256))
    arguments = engine_arguments(deployment, pool, model_path=model, platform="cpu")
    return engine_args(arguments).create_engine_config().speculative_config


@pytest.mark.soak
@pytest.mark.parametrize("method", DRAFTS)
def test_vllm_accepts_a_draft(method: Any, tmp_path: Path) -> None:
    draft = with_config(tmp_path, **DRAFTS[method])
    made = speculative_config(SpeculativeSpec(method=method, model=str(draft), tokens=3), MODEL)
    assert (made.method, made.num_speculative_tokens, made.model) == (method, 3, str(draft))
    assert made.draft_model_config.hf_config.num_hidden_layers == DRAFTS[method].get("num_hidden_layers", 4)


@pytest.mark.soak
def test_vllm_takes_the_prediction_layers_of_the_model_itself(tmp_path: Path) -> None:
    model = with_config(tmp_path, **MTP)
    made = speculative_config(SpeculativeSpec(method="mtp", tokens=1), str(model))
    assert (made.method, made.model) == ("mtp", str(model))
    assert made.draft_model_config.hf_config.architectures == ["DeepSeekMTPModel"]
