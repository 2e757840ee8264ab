"""`kvasir check` refuses a model folder that no engine could start, and says what to do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.model_folder import TOKENIZER, write_model, write_safetensors

from kvasir.config.load import object_storage
from kvasir.config.load.loader import load
from kvasir.config.load.model_support import refuse_model
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.model import model_findings
from kvasir_platform.cluster.preflight.probe import probe_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 4096,
}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 4096}
EMBED = "pools=[{name: v, role: embed}]"


def found(folder: Path, *overrides: str, lacks_torchvision: bool = False) -> list[Finding]:
    deployment = load(None, overrides)
    probe = probe_model(str(folder), "main")
    return [
        finding
        for view in deployment.views()
        for finding in model_findings(view, probe, lacks_torchvision=lacks_torchvision)
    ]


def the_error(folder: Path, *overrides: str) -> Finding:
    (finding,) = found(folder, *overrides)
    assert finding.level == "error"
    assert finding.remedy
    return finding


def test_a_whole_decoder_can_be_served_and_can_embed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    assert [f.level for f in found(folder)] == ["ok"]
    assert [f.level for f in found(folder, EMBED)] == ["ok"]


def test_a_truncated_shard_is_named_with_both_sizes(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    write_safetensors(folder / "model.safetensors", {"w": ("BF16", (8, 8))}, missing_bytes=100)
    finding = the_error(folder)
    assert f"{folder}/model.safetensors is truncated" in finding.message
    assert "downloading it again" in finding.remedy


def test_shards_that_the_index_names_are_missed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of the 2 files" in the_error(folder).message


def test_a_folder_without_weights_or_tokenizer_says_both(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert [finding.message for finding in found(tmp_path)] == [
        f"{tmp_path} has no tokenizer: Kvasir reads tokenizer.json only",
        f"{tmp_path} has no safetensors files",
    ]


def test_a_routers_pod_needs_a_tokenizer_and_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "has no tokenizer" in the_error(tmp_path, "discovery.kind=kubernetes").message
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    assert [f.level for f in found(tmp_path, "discovery.kind=kubernetes")] == ["ok"]


@pytest.mark.parametrize(
    ("file", "what", "convert"),
    [
        ("tokenizer.model", "a SentencePiece tokenizer", "T.from_pretrained('{0}').save_pretrained('{0}')"),
        ("tekken.json", "a Mistral tokenizer", "c('{0}' + '/tekken.json').save_pretrained('{0}')"),
        ("vocab.json", "a slow tokenizer", "T.from_pretrained('{0}').save_pretrained('{0}')"),
    ],
)
def test_another_kind_of_tokenizer_has_to_be_converted(
    tmp_path: Path, file: str, what: str, convert: str
) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / "tokenizer.json").unlink()
    (folder / file).write_text("")
    finding = the_error(folder)
    assert finding.message == f"{folder} has {what} ({file}), and Kvasir reads tokenizer.json only"
    assert convert.format(folder) in finding.remedy


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 17209920\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_git_lfs_has_not_fetched_comes_with_the_command_that_does(
    tmp_path: Path, name: str
) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / name).write_text(POINTER)
    finding = the_error(folder)
    assert finding.message == f"{folder / name} is a pointer of Git LFS and not the file itself"
    assert finding.remedy == f"fetch the files: git -C {folder} lfs pull"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ('{"model": {"vocab": {"a": 0}', "not valid JSON"),
        ("<html>Access denied</html>", "not valid JSON"),
        ("{}", "has no vocabulary, so it is no file of the tokenizers library"),
    ],
)
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / "tokenizer.json").write_text(content)
    finding = the_error(folder)
    assert finding.message.startswith(str(folder / "tokenizer.json"))
    assert message in finding.message
    assert finding.remedy == "download the model's tokenizer.json again"


def test_sampling_defaults_outside_vllms_ranges_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    finding = the_error(folder)
    assert finding.message.startswith(str(folder / "generation_config.json"))
    assert finding.remedy.endswith("set model.generation_config: none")
    assert [f.level for f in found(folder, "model.generation_config=none")] == ["ok"]


@pytest.mark.parametrize(
    ("file", "message", "remedy"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is a pickle", "as M; M.from_pretrained("),
        ("model-Q4_0.gguf", "model-Q4_0.gguf is not read", "download the safetensors files"),
        ("adapter_model.safetensors", "the weights of a LoRA adapter only", "set model.source to the model"),
    ],
)
def test_weights_in_another_format_are_named(tmp_path: Path, file: str, message: str, remedy: str) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / "model.safetensors").rename(folder / file)
    finding = the_error(folder)
    assert message in finding.message
    assert remedy in finding.remedy


def test_weights_of_another_model_are_refused_unless_the_configuration_is_overridden(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": ("BF16", (2, 2))}
    folder = write_model(tmp_path, LLAMA | {"num_hidden_layers": 2}, tensors)
    finding = the_error(folder)
    assert finding.message == f"{folder}: config.json has 2 layers, and the weights have 1"
    with pytest.raises(ConfigError, match="has 2 layers, and the weights have 1; take"):
        refuse_model(load(None), folder)
    for argument in ("hf_overrides: {num_hidden_layers: 1}", f"hf_config_path: {tmp_path}"):
        pools = [f"pools.{name}.engine.args={{{argument}}}" for name in ("prefill", "decode")]
        assert [f.level for f in found(folder, *pools)] == ["ok"]
        refuse_model(load(None, pools), folder)


def test_the_quantization_that_is_checked_is_that_of_the_overridden_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"quantization_config": {"quant_method": "hqq"}})
    assert "quantized with hqq, which vLLM does not read" in the_error(folder).message
    argument = "hf_overrides: {quantization_config: {quant_method: fp8}}"
    pools = [f"pools.{name}.engine.args={{{argument}}}" for name in ("prefill", "decode")]
    assert [f.level for f in found(folder, *pools)] == ["ok"]


def test_an_unknown_architecture_comes_with_the_nearest_known(tmp_path: Path) -> None:
    finding = the_error(write_model(tmp_path, LLAMA | {"architectures": ["LamaForCausalLM"]}))
    assert "LamaForCausalLM" in finding.message
    assert "the nearest known: LlamaForCausalLM" in finding.remedy


def test_simulated_engines_run_every_architecture(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"architectures": ["LamaForCausalLM"]})
    sim = [f"pools.{name}.engine.kind=sim" for name in ("prefill", "decode")]
    assert [f.level for f in found(folder, *sim)] == ["ok"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": None}, "names no architectures"),
        ({"model_type": "lama"}, "do not know model_type lama"),
        ({"architectures": ["BaichuanForCausalLM"]}, "vLLM ran it until version 0.23.0"),
        ({"architectures": ["Nemotron3_5AsrForRNNT"]}, "vLLM runs it with a plugin only (https://"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "only proposes tokens for another model"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
            "has an encoder and a decoder, which vLLM does not run",
        ),
        (
            {
                "architectures": ["WhisperForConditionalGeneration"],
                "model_type": "whisper",
                "is_encoder_decoder": True,
            },
            "has an encoder and a decoder, and no request here has an input for the encoder",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            "needs Python code from its repository (auto_map in config.json)",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "needs Python code from its repository",
        ),
    ],
)
def test_an_architecture_that_no_engine_runs_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in the_error(write_model(tmp_path, LLAMA | config)).message


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["CwmForCausalLM"], "model_type": "cwm"},
        {"architectures": ["HeliumForCausalLM"], "model_type": "helium"},
        {"architectures": ["InternLM2ForCausalLM"], "auto_map": {"AutoModel": "modeling.InternLM2"}},
    ],
)
def test_what_vllm_runs_with_transformers_or_without_the_folders_code_is_served(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert [f.level for f in found(write_model(tmp_path, LLAMA | config))] == ["ok"]


@pytest.mark.parametrize("architecture", ["BertModel", "HF_ColBERT", "Qwen3Model"])
def test_a_model_that_generates_nothing_needs_a_pool_of_role_embed(tmp_path: Path, architecture: str) -> None:
    folder = write_model(tmp_path, BERT | {"architectures": [architecture]})
    finding = the_error(folder)
    assert "pool prefill, decode cannot generate with it" in finding.message
    assert "role: embed" in finding.remedy
    assert [f.level for f in found(folder, EMBED)] == ["ok"]


def test_a_decoder_trained_for_embeddings_needs_a_pool_of_role_embed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "modules.json" in the_error(folder).message
    assert [f.level for f in found(folder, EMBED)] == ["ok"]


def test_an_embed_pool_takes_encoders_that_only_transformers_knows(tmp_path: Path) -> None:
    folder = write_model(tmp_path, BERT | {"architectures": ["ElectraModel"], "model_type": "electra"})
    assert [f.level for f in found(folder, EMBED)] == ["ok"]


def test_a_context_beyond_the_positions_of_a_nested_text_model_is_refused(tmp_path: Path) -> None:
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {"max_position_embeddings": 2048},
    }
    finding = the_error(write_model(tmp_path, nested), "model.max_model_len=2049")
    assert finding.message == "model.max_model_len is 2049, and the model supports 2048 positions"
    assert finding.remedy == "set model.max_model_len to 2048 or less"


def test_rope_scaling_allows_a_longer_context(tmp_path: Path) -> None:
    scaled = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    folder = write_model(tmp_path, scaled)
    assert [f.level for f in found(folder, "model.max_model_len=8192")] == ["ok"]
    assert "supports 8192" in the_error(folder, "model.max_model_len=8193").message


def test_a_multimodal_model_without_torchvision_is_a_warning(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"architectures": ["LlavaForConditionalGeneration"]})
    assert [f.level for f in found(folder, lacks_torchvision=True)] == ["ok", "warning"]
    assert [f.level for f in found(folder)] == ["ok"]
    text = write_model(tmp_path / "text", LLAMA)
    assert [f.level for f in found(text, lacks_torchvision=True)] == ["ok"]


def test_a_checkpoint_in_a_format_that_vllm_does_not_read_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}})
    finding = the_error(folder)
    named = f"{folder} (LlamaForCausalLM)"
    assert finding.message == f"{named} is quantized with bitsandbytes, which vLLM does not read"
    assert "quantized with AWQ, GPTQ, FP8 or compressed-tensors" in finding.remedy
    sim = [f"pools.{name}.engine.kind=sim" for name in ("prefill", "decode")]
    assert [f.level for f in found(folder, *sim)] == ["ok"]


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"quantization_config": {"quant_method": "awq"}})
    assert "is quantized already" in the_error(folder, "model.quantization=int8").message


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
        {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
    ],
)
def test_trusted_code_is_left_to_the_engine(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_model(tmp_path, LLAMA | config)
    assert "set model.trust_remote_code: true" in the_error(folder).remedy
    assert [f.level for f in found(folder, "model.trust_remote_code=true")] == ["warning", "ok"]


def test_arguments_of_vllm_that_change_the_configuration_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"architectures": ["LamaForCausalLM"]})
    both = "pools.{}.engine.args={{hf_overrides: {{architectures: [LlamaForCausalLM], n_positions: 4095}}}}"
    overrides = [both.format(name) for name in ("prefill", "decode")]
    assert [f.message for f in found(folder, *overrides)] == [
        "model.max_model_len is 4096, and the model supports 4095 positions"
    ]
    own = [
        f"pools.{name}.engine.args={{model_class_overrides: {{LamaForCausalLM: 'my.models:Lama'}}}}"
        for name in ("prefill", "decode")
    ]
    assert [f.level for f in found(folder, *own)] == ["ok"]


def test_weights_that_the_engine_makes_up_are_not_needed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    (folder / "model.safetensors").unlink()
    assert "no safetensors" in the_error(folder).message
    dummy = [f"pools.{name}.engine.args={{load_format: dummy}}" for name in ("prefill", "decode")]
    assert [f.level for f in found(folder, *dummy)] == ["ok"]


def test_a_model_without_a_stated_maximum_needs_a_number(tmp_path: Path) -> None:
    assert [f.level for f in found(write_model(tmp_path / "a", LLAMA), "model.max_model_len=auto")] == ["ok"]
    silent = {"architectures": ["LlamaForCausalLM"]}
    finding = the_error(write_model(tmp_path / "b", silent), "model.max_model_len=auto")
    assert "config.json states no number of positions" in finding.message
    assert finding.remedy == "set model.max_model_len to a number"


def test_a_prompt_of_the_models_own_length_must_fit_in_a_step_without_chunks(tmp_path: Path) -> None:
    whole = [
        f"pools.{name}.engine.{each}"
        for name in ("prefill", "decode")
        for each in ("chunked_prefill=false", "max_num_batched_tokens=4095")
    ]
    messages = [f.message for f in found(write_model(tmp_path, LLAMA), "model.max_model_len=auto", *whole)]
    assert len(messages) == 2
    assert all("4095 is less than the 4096 tokens of model.max_model_len auto" in each for each in messages)


@pytest.mark.parametrize("pools", [(), (EMBED,)])
def test_a_model_that_computes_classes_of_tokens_is_served_by_no_pool(
    tmp_path: Path, pools: tuple[str, ...]
) -> None:
    folder = write_model(tmp_path, BERT | {"architectures": ["BertForTokenClassification"]})
    assert "computes classes of tokens or rewards, which no pool serves" in the_error(folder, *pools).message


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_a_model_that_computes_classes_is_served_by_a_pool_that_embeds(
    tmp_path: Path, architecture: str
) -> None:
    folder = write_model(tmp_path, BERT | {"architectures": [architecture]})
    assert [f.level for f in found(folder, EMBED)] == ["ok"]
    finding = the_error(folder)
    assert "computes classes, and no text: pool prefill, decode cannot generate with it" in finding.message
    assert "role: embed" in finding.remedy


def test_a_configuration_in_another_file_is_left_to_the_engine(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA | {"architectures": ["LamaForCausalLM"]})
    other = [f"pools.{name}.engine.args={{hf_config_path: /else}}" for name in ("prefill", "decode")]
    assert [f.level for f in found(folder, *other)] == ["ok"]


def test_without_the_streamer_the_check_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "streamer_is_installed", lambda: False)
    source = "s3://no-such-bucket/m"
    view = load(None, [f"model.source={source}"]).views()[0]
    (finding,) = model_findings(view, probe_model(source, "main"), lacks_torchvision=False)
    assert finding.level == "error"
    assert "needs the package runai-model-streamer, which is not installed" in finding.message
    assert finding.remedy.startswith("install it: pip install ")


def test_a_model_in_object_storage_is_read_by_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_storage, "streamer_is_installed", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    source = "s3://no-such-bucket/m"
    probe = probe_model(source, "main")
    view = load(None, [f"model.source={source}"]).views()[0]
    (finding,) = model_findings(view, probe, lacks_torchvision=False)
    assert finding.level == "warning"
    assert "has not been read from object storage yet" in finding.message
    folder = object_storage_folder(tmp_path, source)
    write_model(folder, LLAMA)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 3 << 20}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = model_findings(view, probe_model(source, "main"), lacks_torchvision=False)
    assert finding.level == "ok"
    assert "3 MiB of weights" in finding.message


def object_storage_folder(home: Path, source: str) -> Path:
    """The local folder of a model in object storage."""
    name = hashlib.sha256(source.encode()).hexdigest()[:32]
    return home / ".cache" / "kvasir" / "object-storage" / name
