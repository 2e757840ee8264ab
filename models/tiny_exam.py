"""The tests of `kvasir-tiny`: prose that was held out, and tools and schemas that it never practised.

Why this exists: the model card says how often the model is right, and a figure that nobody can
make again is worth nothing. Answers are greedy and free of any grammar, as with `tool_choice` auto.
"""

from __future__ import annotations

import itertools
import random

import torch
import torch.nn.functional as F
from tiny_chat import FIRST_WORD, TALK
from tiny_judge import judge
from tiny_practice import ToolMaker
from tiny_vocabulary import BOS, EOS, SIZE
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

KINDS = ("one", "none", "parallel", "result", "json by schema", "json by words")
MAX_NEW = 256
POSITIONS = (0, 256, 512, 1024, 2048, 3072, 4096)


@torch.no_grad()
def copying(
    model: torch.nn.Module, rng: random.Random, length: int = 8, tries: int = 256
) -> tuple[float, float]:
    """(share of tokens right, share of spans right) where a random span comes again after 24 others."""
    spans = torch.tensor(
        [rng.choices(range(FIRST_WORD, SIZE), k=length + 24) for _ in range(tries)], dtype=torch.long
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


def remembered(model: LlamaForCausalLM, tok: PreTrainedTokenizerFast) -> tuple[int, int]:
    """(questions of TALK that get their answer, all of them)."""
    pairs = [(question, answer) for asked, answer in TALK for question in asked.split("|")]
    prompts = [f"<|bos|><|user|>{question}<|end|><|assistant|>" for question, _ in pairs]
    said = answers(model, tok, prompts)
    return sum(text == answer for text, (_, answer) in zip(said, pairs, strict=True)), len(pairs)


@torch.no_grad()
def losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each token of a row but the first."""
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), ids[1:], reduction="none")


def print_prose(
    model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, held: dict[str, list[str]], size: int = 2048
) -> None:
    """Print the perplexity of whole documents, cut at `size` tokens; of rows of 4096 by position too."""
    found = {}
    for name, texts in held.items():
        rows = [torch.tensor([*tok(text)["input_ids"][: size - 1], EOS]) for text in texts]
        found[name] = torch.cat([losses(model, row) for row in rows])
    for name, each in (*found.items(), ("all", torch.cat([*found.values()]))):
        value = each.mean().exp()
        print(f"held out {name:7} {len(each):7,} tokens  perplexity {value:7.2f}", flush=True)
    for name in ("kjv", "austen"):
        stream = torch.tensor([token for text in held[name] for token in (*tok(text)["input_ids"], EOS)])
        rows = stream[: len(stream) // 4096 * 4096].view(-1, 4096)
        mean = torch.stack([losses(model, row) for row in rows]).mean(0)
        by = [f"{a}-{b}: {mean[a : b - 1].mean().exp():.1f}" for a, b in itertools.pairwise(POSITIONS)]
        print(f"held out {name:7} {len(rows)} rows of 4096, perplexity at {'  '.join(by)}", flush=True)
