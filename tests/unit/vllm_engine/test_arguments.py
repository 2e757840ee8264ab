"""The spec as vLLM's arguments, and what is refused before vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from kvasir.checkpoint.kv_movement import KvMovement
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_parsers import answers_alike, with_shared_parsers
from kvasir.config.load.support import Platform, unsupported_features
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ExpertBalancingSpec,
    LoadSpec,
    LoraLoadingSpec,
    LoraSpec,
    ModelSpec,
    PoolSpec,
    SpeculativeSpec,
    TransferSpec,
)
from kvasir.config.spec.engine_args import OWNED
from kvasir.config.spec.tenants import SharedPrefixSpec, TenancySpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.errors import ConfigError
from kvasir.core.media.prompts import MediaKind
from kvasir.core.requests import Role
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.embedding import embedding_arguments
from kvasir_workers.engines.vllm.replica import with_draft
from kvasir_workers.engines.vllm.setup.arguments import (
    CORE_GRAMMARS,
    CUT_OFF,
    EVENT_BACKLOG,
    SALTED_BLOCKS,
    EventEndpoints,
    compilers,
    engine_arguments,
    environment,
    threads_per_rank,
)

TIERS = TiersSpec(cpu=CpuTierSpec())


def one_pool(engine: EngineSpec | None = None, **changes: Any) -> Deployment:
    pool = PoolSpec(name="both", role=Role.BOTH, engine=engine or EngineSpec())
    return Deployment(disaggregation="never", pools=(pool,), **changes)


def on_gpus(gpus: float, **engine: Any) -> Deployment:
    pool = PoolSpec(name="both", role=Role.BOTH, gpus=gpus, engine=EngineSpec(**engine))
    return Deployment(disaggregation="never", pools=(pool,))


def arguments(deployment: Deployment, pool: int = 0, platform: str = "cpu") -> dict[str, Any]:
    return engine_arguments(deployment, deployment.pools[pool], model_path="/m", platform=platform)


def test_on_a_gpu_vllm_measures_how_much_is_left_for_kv() -> None:
    made = arguments(on_gpus(1.0), platform="cuda")
    assert (made["gpu_memory_utilization"], made["kv_cache_memory_bytes"]) == (0.9, None)


def test_pools_that_share_a_gpu_divide_its_memory() -> None:
    made = arguments(on_gpus(0.5, gpu_memory_utilization=0.8), platform="cuda")
    assert made["gpu_memory_utilization"] == 0.4


def test_ranks_with_a_gpu_each_use_the_whole_of_it() -> None:
    spread = on_gpus(2.0, tensor_parallel_size=4, nodes=2)
    assert arguments(spread, platform="cuda")["gpu_memory_utilization"] == 0.9


def test_explicit_bytes_of_kv_are_given_as_they_are() -> None:
    made = arguments(on_gpus(1.0, kv_cache_bytes=1 << 30), platform="cuda")
    assert (made["gpu_memory_utilization"], made["kv_cache_memory_bytes"]) == (0.9, 1 << 30)


def test_on_a_cpu_vllm_never_sizes_kv_itself() -> None:
    made = arguments(one_pool())
    assert made["kv_cache_memory_bytes"] == 128 << 20
    assert "gpu_memory_utilization" not in made


def test_every_engine_power_reaches_vllm() -> None:
    engine = EngineSpec(
        block_size=64,
        kv_cache_bytes=1 << 26,
        kv_dtype="fp8",
        max_num_seqs=7,
        max_num_batched_tokens=99,
        prefix_caching=False,
        chunked_prefill=True,
        tensor_parallel_size=2,
        data_parallel_size=3,
        speculative=SpeculativeSpec(tokens=5, lookup_max=6, lookup_min=3),
    )
    made = arguments(one_pool(engine, lora=(LoraSpec(name="a", path="/a", rank=9),)))
    assert made["model"] == "/m"
    assert (made["block_size"], made["kv_cache_memory_bytes"], made["kv_cache_dtype"]) == (64, 1 << 26, "fp8")
    assert (made["max_num_seqs"], made["max_num_batched_tokens"]) == (7, 99)
    assert (made["enable_prefix_caching"], made["enable_chunked_prefill"]) == (False, True)
    assert (made["tensor_parallel_size"], made["data_parallel_size"]) == (2, 3)
    assert made["distributed_executor_backend"] == "mp"
    assert (made["max_loras"], made["max_lora_rank"]) == (1, 16)
    assert made["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 3,
    }


def test_a_schedule_of_speculation_becomes_ranges_of_batch_sizes() -> None:
    steps = ({"batch": 1, "tokens": 4}, {"batch": 4, "tokens": 2}, {"batch": 16, "tokens": 0})
    spec = SpeculativeSpec.model_validate({"tokens": 4, "schedule": steps})
    made = arguments(one_pool(EngineSpec(speculative=spec)))["speculative_config"]
    assert made["num_speculative_tokens_per_batch_size"] == [(1, 3, 4), (4, 15, 2), (16, 16, 0)]


def test_adapters_that_are_loaded_later_have_their_places_reserved_beside_those_of_the_spec() -> None:
    loading = LoraLoadingSpec(allow=("org/",), max_adapters=3, max_rank=20)
    made = arguments(one_pool(lora=(LoraSpec(name="a", path="/a", rank=9),), lora_loading=loading))
    assert (made["enable_lora"], made["max_loras"], made["max_lora_rank"]) == (True, 4, 32)
    made = arguments(one_pool(lora_loading=loading))
    assert (made["enable_lora"], made["max_loras"]) == (True, 3)
    assert "enable_lora" not in arguments(one_pool(lora_loading=LoraLoadingSpec(max_adapters=3)))


def loading(deployment: Deployment) -> dict[str, Any]:
    names = {"load_format", "model_loader_extra_config", "model_weights", "safetensors_load_strategy"}
    made = arguments(deployment)
    return {name: made[name] for name in sorted({*names, "safetensors_prefetch_num_threads"} & made.keys())}


def reads(engine: EngineSpec | None = None, source: str = "/m", **load: Any) -> dict[str, Any]:
    return loading(one_pool(engine, model=ModelSpec(source=source, load=LoadSpec(**load))))


def test_by_default_only_the_number_of_threads_is_chosen() -> None:
    assert reads() == {"safetensors_prefetch_num_threads": 8}


def test_how_files_are_read_reaches_vllm() -> None:
    assert reads(format="safetensors", strategy="prefetch", threads=3) == {
        "load_format": "safetensors",
        "safetensors_load_strategy": "prefetch",
        "safetensors_prefetch_num_threads": 3,
    }


def test_weights_in_object_storage_are_streamed_to_the_local_configuration() -> None:
    made = arguments(one_pool(model=ModelSpec(source="s3://b/m", load=LoadSpec(threads=32))))
    assert (made["model"], made["model_weights"]) == ("/m", "s3://b/m")
    assert reads(source="s3://b/m", strategy="prefetch", threads=32) == {
        "load_format": "runai_streamer",
        "model_loader_extra_config": {"concurrency": 32},
        "model_weights": "s3://b/m",
    }


def test_files_of_a_folder_can_be_streamed_too() -> None:
    assert reads(format="runai_streamer") == {
        "load_format": "runai_streamer",
        "model_loader_extra_config": {"concurrency": 8},
    }


@pytest.mark.parametrize(
    "args", [{"load_format": "dummy"}, {"model_loader_extra_config": {"enable_multithread_load": True}}]
)
def test_another_loader_of_vllm_gets_no_settings_of_the_model(args: Any) -> None:
    assert reads(EngineSpec(args=args), strategy="prefetch", format="safetensors") == args
    streamed = {"load_format": "runai_streamer_sharded"}
    weights = {"model_weights": "s3://b/m"}
    assert reads(EngineSpec(args=streamed), source="s3://b/m") == streamed | weights


OVERRIDABLE = {"enforce_eager"}
"""Arguments that Kvasir sets and `engine.args` may set otherwise."""


def test_what_the_spec_sets_cannot_be_set_a_second_time() -> None:
    everything = EngineSpec(
        reasoning_parser="qwen3",
        data_parallel_size=2,
        nodes=2,
        kv_events=False,
        expert_parallel=True,
        all2all_backend="deepep_low_latency",
        eplb=ExpertBalancingSpec(),
        dual_batch_overlap=True,
        speculative=SpeculativeSpec(),
    )
    model = ModelSpec(quantization="fp8")
    deployment = one_pool(everything, lora=(LoraSpec(name="a", path="/a"),), tiers=TIERS, model=model)
    pool = PoolSpec(name="vectors", role=Role.EMBED)
    embeds = Deployment(pools=(pool,)).views()[0]
    made = engine_arguments(
        deployment,
        deployment.pools[0],
        model_path="/m",
        platform="cuda",
        movement=KvMovement(layers=2, widened=1, window=8),
        events=EventEndpoints(Path("/run/x")),
        place=NodePlace(rank=0, leader="10.0.0.1", port=1, rpc_port=2, address="10.0.0.1"),
    )
    made |= embedding_arguments(embeds, embeds.pools[0], model_path="/m", platform="cuda")
    assert set(made) - set(OWNED) == OVERRIDABLE


def test_further_arguments_are_applied_last() -> None:
    engine = EngineSpec(args={"enforce_eager": False, "cpu_offload_gb": 2.0})
    made = arguments(one_pool(engine))
    assert (made["enforce_eager"], made["cpu_offload_gb"]) == (False, 2.0)


def test_code_of_a_model_is_run_only_if_the_spec_says_so() -> None:
    assert arguments(one_pool())["trust_remote_code"] is False
    assert arguments(one_pool(model=ModelSpec(trust_remote_code=True)))["trust_remote_code"] is True


def test_vllm_is_given_its_own_methods_of_quantization_only() -> None:
    assert "quantization" not in arguments(one_pool())
    assert "quantization" not in arguments(one_pool(model=ModelSpec(quantization="int8")))
    assert arguments(one_pool(model=ModelSpec(quantization="awq")))["quantization"] == "awq"


def test_only_a_deployment_that_moves_kv_gets_a_connector() -> None:
    assert "kv_transfer_config" not in arguments(one_pool())
    apart = Deployment()
    assert arguments(apart, 0)["kv_transfer_config"]["kv_role"] == "kv_producer"
    assert arguments(apart, 1)["kv_transfer_config"]["kv_role"] == "kv_consumer"
    config = arguments(apart, 1)["kv_transfer_config"]
    assert config["kv_load_failure_policy"] == apart.transfer.on_failure
    assert config["kv_connector_extra_config"]["timeout_s"] == 0.8 * apart.transfer.timeout_s


def test_an_aggregated_engine_with_tiers_gets_a_connector_that_hands_nothing_over() -> None:
    tiers = TiersSpec(redis=RedisTierSpec(url="redis://127.0.0.1:6379/0", password_file="/secret"))
    spec = one_pool(tiers=tiers, lora=(LoraSpec(name="a", path="/a", rank=8),))
    config = arguments(spec)["kv_transfer_config"]
    settings = config["kv_connector_extra_config"]
    assert config["kv_role"] == "kv_both"
    assert "transfer" not in settings
    assert TiersSpec.model_validate(settings["tiers"]) == tiers
    assert (settings["model"], settings["adapters"]) == (spec.model.name, {"a": "/a"})
    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("overlap", "platform", "early"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("always", "cpu", True), ("never", "cuda", False)],
)
def test_prompts_are_handed_over_early_by_themselves_only_between_gpus(
    overlap: Literal["auto", "always", "never"], platform: str, early: bool
) -> None:
    deployment = Deployment(transfer=TransferSpec(overlap=overlap))
    settings = arguments(deployment, platform=platform)["kv_transfer_config"]["kv_connector_extra_config"]
    assert settings["overlap"] is early


def test_blocks_that_tiers_keep_have_names_that_hold_outside_the_process() -> None:
    assert arguments(one_pool(tiers=TIERS))["prefix_caching_hash_algo"] == "sha256_cbor"


def test_engines_without_tiers_name_blocks_as_fast_as_vllm_can() -> None:
    assert "prefix_caching_hash_algo" not in arguments(one_pool())


def test_a_gpu_engine_compiles_and_a_cpu_engine_does_not() -> None:
    assert arguments(one_pool(), platform="cpu")["enforce_eager"] is True
    assert arguments(one_pool(), platform="cuda")["enforce_eager"] is False


@pytest.mark.parametrize(("cpus", "share"), [(1, 1), (2, 1), (8, 4), (9, 4)])
def test_replicas_share_the_machine_equally(cpus: int, share: int) -> None:
    deployment = Deployment()
    assert threads_per_rank(deployment, deployment.pools[0], cpus=cpus) == share


def test_threads_of_the_spec_win() -> None:
    deployment = one_pool(EngineSpec(threads=3))
    variables = environment(deployment, deployment.pools[0], cpus=64, platform="cpu")
    assert variables["OMP_NUM_THREADS"] == "3"


def test_threads_of_a_cpu_engine_leave_their_cpus_between_steps() -> None:
    deployment = one_pool()
    variables = environment(deployment, deployment.pools[0], cpus=64, platform="cpu")
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_gpu_engine_is_not_told_about_threads() -> None:
    deployment = one_pool()
    variables = environment(deployment, deployment.pools[0], cpus=64, platform="cuda")
    assert not [name for name in variables if name.startswith("OMP_")]


def test_the_default_deployment_is_refused_nowhere_that_it_fits() -> None:
    assert unsupported_features(Deployment(), platform="cpu") == []
    assert unsupported_features(one_pool(EngineSpec(kind="sim", block_size=1)), platform="cpu") == []


@pytest.mark.parametrize(
    ("platform", "engine", "changes", "field"),
    [
        ("cpu", {"block_size": 48}, {}, "engine.block_size"),
        ("cpu", {"pipeline_parallel_size": 2}, {}, "engine.pipeline_parallel_size"),
        ("cpu", {"expert_parallel": True}, {}, "engine.expert_parallel"),
        ("cpu", {}, {"model": ModelSpec(quantization="int8", dtype="float32")}, "model.dtype"),
        ("cpu", {}, {"model": ModelSpec(quantization="fp8")}, "model.quantization"),
        ("cpu", {"chunked_prefill": False}, {}, "engine.max_num_batched_tokens"),
        ("cpu", {"max_num_batched_tokens": 32}, {}, "engine.max_num_batched_tokens"),
        ("cpu", {"prefix_caching": False}, {"tiers": TIERS}, "engine.prefix_caching"),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(
    platform: Platform, engine: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    (reason,) = unsupported_features(one_pool(EngineSpec(**engine), **changes), platform=platform)
    named, _, rest = reason.partition(": ")
    assert named.endswith(field)
    assert ";" in rest, "a refusal says what to do"


def test_fewer_gpus_than_ranks_are_refused_unless_the_machine_decides() -> None:
    (reason,) = unsupported_features(on_gpus(1.0, tensor_parallel_size=2), platform="cuda")
    assert "gpus: 1, and the engine's ranks need 2" in reason
    assert unsupported_features(one_pool(EngineSpec(tensor_parallel_size=2)), platform="cuda") == []


def test_stages_keep_blocks_in_every_tier() -> None:
    pool = PoolSpec(name="both", role=Role.BOTH, engine=EngineSpec(pipeline_parallel_size=2), gpus=2)
    tiers = TiersSpec(disk=DiskTierSpec(path="/kv"), redis=RedisTierSpec(url="redis://r:6379"))
    deployment = Deployment(disaggregation="never", pools=(pool,), tiers=tiers)
    assert unsupported_features(deployment, platform="cuda") == []


def test_a_prefill_pool_does_not_speculate() -> None:
    engine = EngineSpec(speculative=SpeculativeSpec())
    deployment = Deployment(
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        )
    )
    (reason,) = unsupported_features(deployment, platform="cpu")
    assert reason.startswith("pools.prefill.engine.speculative:")


@pytest.mark.parametrize(
    ("spec", "passed"),
    [
        ({"method": "draft_model", "model": "/d", "tokens": 3}, {"method": "draft_model", "model": "/d"}),
        ({"method": "eagle3", "model": "/d", "tokens": 3}, {"method": "eagle3", "model": "/d"}),
        ({"method": "medusa", "model": "/d", "tokens": 3}, {"method": "medusa", "model": "/d"}),
        ({"method": "mtp", "tokens": 3}, {"method": "mtp"}),
    ],
)
def test_each_way_to_speculate_reaches_vllm(spec: dict[str, Any], passed: dict[str, Any]) -> None:
    engine = EngineSpec(speculative=SpeculativeSpec(**spec))
    assert arguments(one_pool(engine))["speculative_config"] == passed | {"num_speculative_tokens": 3}
    assert unsupported_features(one_pool(engine), platform="cpu") == []


def test_a_draft_is_loaded_from_its_folder() -> None:
    def pool(model: str) -> PoolSpec:
        spec = SpeculativeSpec(method="draft_model", model=model)
        return PoolSpec(name="both", role=Role.BOTH, engine=EngineSpec(speculative=spec))

    drafted = with_draft(pool("kvasir-tiny")).engine.speculative
    assert drafted is not None
    assert drafted.model == str(resolve_model("kvasir-tiny"))
    with pytest.raises(ConfigError, match=r"^pools\.both\.engine\.speculative\.model '/absent'"):
        with_draft(pool("/absent"))
    plain = PoolSpec(name="both", role=Role.BOTH)
    assert with_draft(plain) is plain


@pytest.mark.parametrize("moving", ["disaggregated", "tiered"])
def test_a_draft_whose_kv_could_not_be_moved_is_refused(moving: str) -> None:
    engine = EngineSpec(speculative=SpeculativeSpec(method="draft_model", model="/d"))
    apart = (
        PoolSpec(name="prefill", role=Role.PREFILL),
        PoolSpec(name="decode", role=Role.DECODE, engine=engine),
    )
    deployment = Deployment(pools=apart) if moving == "disaggregated" else one_pool(engine, tiers=TIERS)
    (reason,) = unsupported_features(deployment, platform="cpu")
    assert ".engine.speculative.method: the KV of draft_model" in reason


def test_an_engine_publishes_its_kv_events_only_where_it_is_told() -> None:
    assert "kv_events_config" not in arguments(one_pool())
    deployment = one_pool(EngineSpec(data_parallel_size=2))
    events = EventEndpoints(Path("/run/x"))
    made = engine_arguments(deployment, deployment.pools[0], model_path="/m", platform="cpu", events=events)[
        "kv_events_config"
    ]
    assert made["enable_kv_cache_events"] is True
    assert (made["endpoint"], made["replay_endpoint"]) == events.of_rank(0)
    assert events.of_rank(0) == ("ipc:///run/x/inproc-events", "ipc:///run/x/inproc-replay")
    assert events.of_rank(1) == ("ipc:///run/x/inproc-events_dp1", "ipc:///run/x/inproc-replay_dp1")
    # What may wait is bounded on every hop.
    assert {made["buffer_steps"], made["hwm"], made["max_queue_size"]} == {EVENT_BACKLOG}


def test_the_number_of_images_is_limited_for_models_that_take_them_only() -> None:
    deployment = one_pool()
    made = engine_arguments(
        deployment, deployment.pools[0], model_path="/m", platform="cpu", media=[MediaKind.IMAGE]
    )
    assert made["limit_mm_per_prompt"] == {"image": 8, "video": 0, "audio": 0}
    assert made["mm_processor_cache_gb"] == 0
    assert not {"limit_mm_per_prompt", "mm_processor_cache_gb"} & set(arguments(deployment))
    variables = environment(deployment, deployment.pools[0], cpus=1, platform="cpu")
    assert variables["VLLM_MAX_IMAGE_PIXELS"] == str(1 << 24)


def test_salts_are_placed_by_engines_of_deployments_with_shared_prefixes_only() -> None:
    declared = TenancySpec(shared_prefixes=(SharedPrefixSpec(name="help", text="x"),))
    made = arguments(one_pool().model_copy(update={"tenancy": declared}))["structured_outputs_config"]
    assert made["reasoning_parser_plugin"] == SALTED_BLOCKS
    assert SALTED_BLOCKS.rpartition(".")[2] == "salted_blocks"


def test_rules_and_reasoning_reach_the_engine_core() -> None:
    made = arguments(one_pool())["structured_outputs_config"]
    assert (made["backend"], made["disable_any_whitespace"]) == ("xgrammar", True)
    assert made["reasoning_parser_plugin"] == CORE_GRAMMARS
    assert "reasoning_parser" not in arguments(one_pool())
    engine = EngineSpec(reasoning_parser="qwen3", structured_outputs="guidance", compact_json=False)
    made = arguments(one_pool(engine))
    assert made["reasoning_parser"] == "qwen3"
    assert made["structured_outputs_config"]["backend"] == "guidance"
    assert made["structured_outputs_config"]["disable_any_whitespace"] is False
    assert compilers(EngineSpec()) == ("xgrammar", "guidance")


def test_outputs_are_cut_off_only_where_that_is_wanted() -> None:
    assert "additional_config" not in arguments(one_pool())
    own = {"additional_config": {"mine": 1}}
    assert arguments(one_pool(EngineSpec(args=own)))["additional_config"] == {"mine": 1}
    made = arguments(one_pool(EngineSpec(args=own, complete_outputs=False)))
    assert made["additional_config"] == {"mine": 1, CUT_OFF: True}


def test_a_pool_that_prefills_has_the_parsers_of_the_one_that_answers_and_can_answer_for_it() -> None:
    reasons = EngineSpec(reasoning_parser="qwen3", tool_parser="hermes")
    prefill = PoolSpec(name="prefill", role=Role.PREFILL)
    apart = Deployment(pools=(prefill, PoolSpec(name="decode", role=Role.DECODE, engine=reasons)))
    assert not answers_alike(apart, apart.pools[0])
    shared = with_shared_parsers(apart)
    assert shared.pools[0].engine.tool_parser == "hermes"
    assert arguments(shared)["reasoning_parser"] == "qwen3"
    assert all(answers_alike(shared, pool) for pool in shared.pools)
    other = prefill.model_copy(update={"engine": EngineSpec(tool_parser="mistral")})
    mixed = with_shared_parsers(apart.model_copy(update={"pools": (other, apart.pools[1])}))
    assert mixed.pools[0].engine.tool_parser == "mistral"
    assert not answers_alike(mixed, mixed.pools[0])
    assert with_shared_parsers(shared) is shared


@pytest.mark.parametrize(
    ("field", "name", "offered"),
    [
        ("tool_parser", "herms", "hermes"),
        ("tool_parser", "qwen", "qwen3_coder"),
        ("reasoning_parser", "deepseek-r1", "deepseek_r1"),
        ("reasoning_parser", "zzz", "choose one of cohere_command3"),
    ],
)
def test_a_parser_that_the_engine_has_not_is_refused_with_near_names(
    field: str, name: str, offered: str
) -> None:
    (reason,) = unsupported_features(one_pool(EngineSpec.model_validate({field: name})), platform="cpu")
    assert reason.startswith(f"pools.both.engine.{field}: the engine knows no {name!r}")
    assert offered in reason


def test_pools_that_generate_take_output_apart_in_one_way() -> None:
    def deployment(*parsers: str | None) -> Deployment:
        engines = [EngineSpec(tool_parser=parser) for parser in parsers]
        roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
        names = ("first", "second", "third")
        pools = zip(names, roles, engines, strict=True)
        return Deployment(pools=tuple(PoolSpec(name=n, role=r, engine=e) for n, r, e in pools))

    assert unsupported_features(deployment(None, "hermes", "hermes"), platform="cpu") == []
    (reason,) = unsupported_features(deployment(None, "hermes", None), platform="cpu")
    assert reason.startswith("pools.third.engine.tool_parser: none, and pool second of the same model")


@pytest.mark.parametrize(
    ("deployment", "movement", "disabled"),
    [
        (Deployment(), KvMovement(layers=6, widened=5, window=512), True),
        (one_pool(tiers=TIERS), KvMovement(layers=6, widened=5, window=512), True),
        (Deployment(), KvMovement(layers=6), None),
        (one_pool(), None, None),
    ],
    ids=["handed over", "in tiers", "of one kind", "not moved"],
)
def test_layers_with_windows_keep_every_token_only_where_kv_is_moved(
    deployment: Deployment, movement: KvMovement | None, disabled: bool | None
) -> None:
    made = engine_arguments(
        deployment, deployment.pools[0], model_path="/m", platform="cpu", movement=movement
    )
    assert made.get("disable_hybrid_kv_cache_manager") is disabled
