"""A tokenizer with a vocabulary of realistic size, built offline.

The cost of tokenizing a prompt depends on the vocabulary: a small one fits into the processor's cache and
merges less. No full-size model can be downloaded where the benchmarks run, so this module trains a byte-level
BPE with Llama 3's pre-tokenizer and chat template on the installed Python sources. The same packages give the
same vocabulary; its hash is stated in the reports.

    python -m load_tests.vocabulary

prints the folder, which can be used as `model.source` of a gateway without an engine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvasir.config.load.model_files import resolve_model

MERGED = 131_072
"""Number of ids of bytes and merges."""
_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(251)),
)
_CORPUS_BYTES = 40 << 20
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim }}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_CACHE = Path(__file__).resolve().parents[1] / "build" / "vocabulary"


def large_model(folder: Path = _CACHE) -> Path:
    """Return a model folder without weights whose tokenizer has 131,072 merged ids and 256 special tokens.
    The first call trains it (about two minutes on one core) and keeps it in `folder`."""
    if not (folder / "tokenizer.json").exists():
        made = folder.with_suffix(".partial")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        _train().save(str(made / "tokenizer.json"))
        config = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[4], "chat_template": _TEMPLATE}
        (made / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    _write_config(folder)
    return folder


def _write_config(folder: Path) -> None:
    """Write the configuration of a model with an embedding of each id; an earlier folder may have another."""
    config = json.loads((resolve_model("kvasir-tiny") / "config.json").read_text())
    text = json.dumps(config | {"vocab_size": MERGED + len(_SPECIALS)}, indent=1) + "\n"
    path = folder / "config.json"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def vocabulary_hash(folder: Path) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the tokenizer's file."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:12]


def sources() -> list[Path]:
    """The installed Python sources, in an order that depends only on their names and mixes packages."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib")}
    found = {path.relative_to(root).as_posix(): path for root in sorted(roots) for path in root.rglob("*.py")}
    return [found[name] for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())]


def _corpus() -> Iterator[str]:
    left = _CORPUS_BYTES
    for path in sources():
        if left <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        yield text


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=MERGED,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=64,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIALS[0]} $A",
        pair=f"{_SPECIALS[0]} $A $B",
        special_tokens=[(_SPECIALS[0], MERGED)],
    )
    return tokenizer


if __name__ == "__main__":
    made = large_model()
    print(made, vocabulary_hash(made))
