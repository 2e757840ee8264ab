"""Makes a tiny model with random weights that hears: Qwen2-Audio, which vLLM's CPU build runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models.media_tokenizer import make_media_tokenizer
from tests.kit.models.tiny_media import TEXT, save_media_model

PLACEHOLDER = "<|AUDIO|>"
RATE = 16_000
_MELS = 128
_TEXT = TEXT | {"model_type": "qwen2"}
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
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_media_tokenizer(folder, {"audio": PLACEHOLDER}, "<|audio_bos|>", "<|audio_eos|>")
    config = transformers.Qwen2AudioConfig(
        text_config={**_TEXT, "vocab_size": max(ids.values()) + 1},
        audio_config=_AUDIO,
        audio_token_index=ids[PLACEHOLDER],
    )
    parts = "language_model.model.model.", "language_model.model."
    save_media_model(transformers.Qwen2AudioForConditionalGeneration, config, folder, parts)
    extractor: Any = transformers.WhisperFeatureExtractor
    features = extractor(
        feature_size=_MELS, sampling_rate=RATE, chunk_length=30, return_attention_mask=True
    ).to_dict()
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**features, "processor_class": "Qwen2AudioProcessor"})
    )
    (folder / "done").touch()
    return folder
