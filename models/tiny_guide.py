"""Shows heads of `kvasir-tiny` where to look, until they look there by themselves.

Why this exists: to copy, a head in one layer has to look at the token before, and a head in a later
layer at the token that came after the present one's last occurrence (Olsson et al. 2022, "In-context
Learning and Induction Heads"). Neither helps without the other, so a small model stays long without
both. Where a head looks can be taught directly, as the places are known.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_chat import FIRST_WORD

BEFORE = ((0, 0), (0, 1))  # (layer, head): look at the token before
AFTER = ((1, 0), (1, 1), (2, 0), (2, 1))  # look at what came after this token
LEAST = 1e-5


def sources(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Where a learned token is to be copied from: [row, t, s] is set if token s is what comes after t, and
    came after the same token as t. Shape (rows, tokens - 1, tokens - 1)."""
    now, coming = ids[:, :-1], ids[:, 1:]
    before = F.pad(now[:, :-1], (1, 0), value=-1)
    same = (now[:, :, None] == before[:, None, :]) & (coming[:, :, None] == now[:, None, :])
    learned = (labels[:, 1:] != -100) & (now >= FIRST_WORD)
    return same.tril() & learned[:, :, None]


def astray(attentions: tuple[torch.Tensor, ...], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log of the attention that goes where it should, over both sorts of heads.

    `attentions`: by layer, (rows, heads, tokens - 1, tokens - 1)."""
    total = torch.zeros(())
    for layer, head in BEFORE:
        right = attentions[layer][:, head].diagonal(-1, 1, 2)
        total = total - right.float().clamp_min(LEAST).log().mean() / len(BEFORE)
    wanted = sources(ids, labels)
    if (some := wanted.any(-1)).any():
        for layer, head in AFTER:
            right = (attentions[layer][:, head] * wanted).sum(-1)[some]
            total = total - right.float().clamp_min(LEAST).log().mean() / len(AFTER)
    return total
