"""Makes tokenizers of models that take images, videos or audio: that of kvasir-tiny with further tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from kvasir.config.load.model_files import resolve_model

_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}PLACES{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_media_tokenizer(folder: Path, kinds: Mapping[str, str], *others: str) -> dict[str, int]:
    """Write the tokenizer of kvasir-tiny into `folder`, with special tokens that stand for media: the kind of
    each, as in `image`, and its text. `others` are further special tokens. The chat template has the tokens
    of `kinds`. Return the ids of all by their texts."""
    source = resolve_model("kvasir-tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, folder / name)
    tests = [f"if part.type == '{kind}' %}}{text}" for kind, text in kinds.items()]
    places = "{% " + "{% el".join(tests) + "{% else %}"
    (folder / "chat_template.jinja").write_text(_PARTS.replace("PLACES", places))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first: int = 1 + max(
        *tokenizer["model"]["vocab"].values(), *(each["id"] for each in tokenizer["added_tokens"])
    )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = {text: first + at for at, text in enumerate((*kinds.values(), *others))}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, "special": True, **flags} for text, number in ids.items()
    ]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    path = folder / "tokenizer_config.json"
    named = {f"{kind}_token": text for kind, text in kinds.items()}
    config = json.loads(path.read_text()) | {"extra_special_tokens": named}
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return ids
