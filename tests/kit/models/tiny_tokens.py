"""Tokens of kvasir-tiny by what they write, so that tests state words and not numbers of its vocabulary.

Read by its place in the checkout: tables of reports import it, and go without the product.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).resolve().parents[3] / "models" / "kvasir-tiny" / "tokenizer.json")
)
VOCABULARY: int = TOKENIZER.get_vocab_size()


def ids(text: str) -> list[int]:
    """Return the tokens of a text, control tokens included."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


WHITE = tuple(token for text in ("\t", "\n", "\r", " ", "\n\n") for token in ids(text))
"""Tab, newlines and space: where a grammar allows any, the model may write nothing else."""
