"""The test of `kvasir-tiny` in tools and JSON: tools and schemas that it never practised.

Why this exists: the model card says how often the model is right, and a figure that nobody can
make again is worth nothing. Answers are greedy and free of any grammar, as with `tool_choice` auto.
"""

from __future__ import annotations

import random

import torch
from tiny_chat import FIRST_WORD
from tiny_judge import judge
from tiny_rows import BOS
from tiny_tools import ToolMaker
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

KINDS = ("one", "none", "parallel", "result", "json by schema", "json by words")
MAX_NEW = 256


@torch.no_grad()
def copying(
    model: torch.nn.Module, rng: random.Random, length: int = 8, tries: int = 256
) -> tuple[float, float]:
    """(share of tokens right, share of spans right) where a random span comes again after 24 others."""
    spans = torch.tensor(
        [rng.choices(range(FIRST_WORD, 4096), k=length + 24) for _ in range(tries)], dtype=torch.long
    )
    start = torch.full((tries, 1), BOS)
    ids = torch.cat([start, spans, spans[:, :length]], dim=1)
    said = model(input_ids=ids, use_cache=False).logits.argmax(-1)[:, -length:-1]
    right = said == ids[:, 1 - length :]
    return right.float().mean().item(), right.all(dim=1).float().mean().item()


@torch.no_grad()
def answers(
    model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, prompts: list[str], batch: int = 32
) -> list[str]:
    """What the model says at temperature 0, to prompts as the chat template renders them."""
    order, said = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [""] * len(prompts)
    tok.padding_side = "left"
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        given = tok([prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW,
        )
        for i, ids in zip(chosen, out[:, given["input_ids"].shape[1] :], strict=True):
            said[i] = tok.decode(ids, skip_special_tokens=True)
    return said


def exam(
    model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, maker: ToolMaker, each: int, show: int = 0
) -> dict[str, dict[str, int]]:
    """How many of `each` cases of each kind are right, by what is right; prints `show` wrong ones of each."""
    found = {}
    for number, kind in enumerate(KINDS):
        cases = []
        for i in range(each):
            maker.seed(number * 100_003 + i)
            cases.append(maker.case(kind))
        said = answers(model, tok, [case.prompt for case in cases])
        verdicts = [judge(case, text) for case, text in zip(cases, said, strict=True)]
        found[kind] = {key: sum(verdict[key] for verdict in verdicts) for key in ("tool", "valid", "all")}
        wrong = [pair for *pair, verdict in zip(cases, said, verdicts, strict=True) if not verdict["all"]]
        for case, text in wrong[:show]:
            print(f"{case.prompt}\n  wanted {case.answer}\n  said   {text}\n")
    return found
