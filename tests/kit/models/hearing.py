"""Makes a tiny model with random weights that hears: Qwen2-Audio, which vLLM's CPU build runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models.media_tokenizer import make_media_tokenizer

_SEED = 27
PLACEHOLDER = "<|AUDIO|>"
RATE = 16_000
_MELS = 128
_TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 6,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_AUDIO: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": _MELS,
    "max_source_positions": 1500,
    "initializer_range": 0.2,
}


def make_hearing_model(folder: Path) -> Path:
    """Write the model into `folder`, with the same weights each time, and return it. Does nothing if it is
    there."""
    if (folder / "done").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_media_tokenizer(folder, {"audio": PLACEHOLDER}, "<|audio_bos|>", "<|audio_eos|>")
    config = transformers.Qwen2AudioConfig(
        text_config={**_TEXT, "vocab_size": max(ids.values()) + 1},
        audio_config=_AUDIO,
        audio_token_index=ids[PLACEHOLDER],
    )
    torch.manual_seed(_SEED)
    made = transformers.Qwen2AudioForConditionalGeneration(config).to(torch.float32).eval()
    made.save_pretrained(folder, safe_serialization=True)
    _rename(folder / "model.safetensors")
    extractor: Any = transformers.WhisperFeatureExtractor
    features = extractor(
        feature_size=_MELS, sampling_rate=RATE, chunk_length=30, return_attention_mask=True
    ).to_dict()
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**features, "processor_class": "Qwen2AudioProcessor"})
    )
    (folder / "done").touch()
    return folder


def _rename(path: Path) -> None:
    """Give the weights the names of published checkpoints: transformers writes one `model.` too many."""
    from safetensors.torch import load_file, save_file

    wrong, right = "language_model.model.model.", "language_model.model."
    save_file(
        {name.replace(wrong, right): each for name, each in load_file(path).items()}, path, {"format": "pt"}
    )
