"""Shows heads of `kvasir-tiny` which word of a chat an answer goes on with.

Why this exists: a value of a call is a word of the user's, but in other tokens: ` Paris` is one word
after a space and another after a quotation mark. A head that looks at the word it stands for leaves
only its spelling to learn, which is the same in every chat.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tiny_chat import FIRST_WORD

if TYPE_CHECKING:  # the test of the pairs goes without the library, which is slow to import
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

POINTING = {2: (2, 4, 6), 3: (0, 2)}  # heads by layer
LEAST = 1e-4
_WORD = re.compile(r"[A-Za-z]+|\d+")


def spellings(tok: PreTrainedTokenizerFast) -> list[str]:
    """What each token writes; control tokens write a mark that is in no word."""
    return [
        "\0" if i < FIRST_WORD else token
        for i, token in enumerate(tok.convert_ids_to_tokens(range(len(tok))))
    ]


def pointers(
    spelled: list[str], ids: list[int], labels: list[int], texts: list[int]
) -> list[tuple[int, int]]:
    """(t, s): the token after t, which is learned, goes on with a word that token s of the question holds."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and texts[end] == texts[start]:
            end += 1
        owner = [at for at in range(start, end) for _ in spelled[ids[at]]]
        asked: dict[str, list[int]] = {}
        for match in _WORD.finditer("".join(spelled[ids[at]] for at in range(start, end))):
            first, last = match.span()
            if labels[owner[first]] == -100:
                asked.setdefault(match[0], []).append(first)
                continue
            for char in range(first, last):
                if char == first or owner[char] != owner[char - 1]:
                    found += [
                        (owner[char] - 1, owner[begin + char - first]) for begin in asked.get(match[0], ())
                    ]
        start = end
    return found


def wanted(spelled: list[str], ids: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """`pointers` of each row as a mask of shape (rows, tokens - 1, tokens - 1)."""
    rows, size = ids.shape
    found = torch.zeros(rows, size - 1, size - 1, dtype=torch.bool)
    for row, parts in enumerate(zip(ids.tolist(), labels.tolist(), texts.tolist(), strict=True)):
        if pairs := pointers(spelled, *parts):
            here, there = torch.tensor(pairs).T
            found[row, here, there] = True
    return found


def _turned(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries or keys, (rows, heads, tokens, width), turned by their positions."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _looks(
    layer: torch.nn.Module,
    heads: tuple[int, ...],
    hidden: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention of `heads`, of shape (rows, heads, tokens, tokens)."""
    own, size = layer.self_attn, layer.self_attn.head_dim
    x = layer.input_layernorm(hidden)

    def of(weight: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        part = weight.view(-1, size, weight.shape[1])[chosen].flatten(0, 1)
        return F.linear(x, part).unflatten(-1, (len(chosen), size)).transpose(1, 2)

    q = _turned(of(own.q_proj.weight, list(heads)), rope)
    k = _turned(of(own.k_proj.weight, [head // own.num_key_value_groups for head in heads]), rope)
    scores = (q @ k.transpose(2, 3)).float() * own.scaling
    return scores.masked_fill(~mask, -1e9).softmax(-1)


def pointed_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """The loss of rows, with how far the pointing heads look from `wanted` in the last rows.

    `mask`: (rows, 1, tokens - 1, tokens - 1), true where a token may look."""
    inner, count = model.model, wanted.shape[0]
    total = torch.zeros(())
    some = wanted.any(-1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = inner.embed_tokens(ids[:, :-1])
        rope = inner.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for number, layer in enumerate(inner.layers):
            if heads := POINTING.get(number):
                looks = _looks(layer, heads, hidden[-count:], rope, mask[-count:])
                right = (looks * wanted[:, None]).sum(-1).clamp_min(LEAST).log().mean(1)
                total = total - (right * some).sum() / some.sum().clamp_min(1)
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
        logits = model.lm_head(inner.norm(hidden))
    learned = labels[:, 1:].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), learned, ignore_index=-100) + total / len(POINTING)
