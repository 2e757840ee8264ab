"""How `kvasir-tiny` is trained: batches of prose, chats, copies and tools, and the steps over them.

Why this exists: the stages of train_tiny.py differ in what they show the model, and in nothing else.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_chat import ChatMaker
from tiny_guide import astray
from tiny_pointers import pointed_loss, spellings, wanted
from tiny_practice import ToolMaker, samples
from tiny_rows import Rows, chat_rows, copy_rows, tool_rows
from tiny_vocabulary import EOS, draw_together, twins
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def loss_of(
    model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def guided_loss(model: LlamaForCausalLM, rows: Rows) -> torch.Tensor:
    """`loss_of`, with how far heads look from where they should. Rows are of one text each."""
    model.set_attn_implementation("eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=rows.ids[:, :-1], use_cache=False, output_attentions=True)
    model.set_attn_implementation("sdpa")
    learned = rows.labels[:, 1:].flatten()
    loss = F.cross_entropy(out.logits.float().flatten(0, 1), learned, ignore_index=-100)
    return loss + astray(out.attentions, rows.ids, rows.labels)


def stream_of(tok: PreTrainedTokenizerFast, docs: list[str]) -> torch.Tensor:
    """All documents as one token line: <|bos|> text <|eos|> <|bos|> text <|eos|> ..."""
    return torch.tensor([t for ids in tok(docs)["input_ids"] for t in (*ids, EOS)])


def windows(stream: torch.Tensor, rng: random.Random, batch: int, size: int) -> torch.Tensor:
    starts = [rng.randrange(len(stream) - size) for _ in range(batch)]
    return torch.stack([stream[s : s + size] for s in starts])


TOGETHER = 0.1  # share of the way between twins, each step


@dataclass
class Phase:
    """A stretch of training; the learning rate falls in a line from `peak` to `final`."""

    name: str
    steps: int
    batch: int
    size: int
    peak: float
    final: float
    chat: float = 0.0  # share of the rows that are conversations
    drill: float = 0.0  # share of the turns in them that only copy words
    copy: float = 0.0  # share of the rows that are spans which come again
    tools: float = 0.0  # share of the rows that are conversations with tools and JSON
    level: float = 1.0  # of those: how many tools and arguments there are
    words: float = 0.0  # of those: share of lists of words
    guided: bool = False  # whether heads are shown where to look
    pointed: bool = False  # whether they are shown which word an answer goes on with

    def counts(self) -> tuple[int, int, int]:
        """Rows of a batch that are conversations, copies and tools; the others are prose."""
        return int(self.batch * self.chat), int(self.batch * self.copy), int(self.batch * self.tools)


@dataclass
class Trainer:
    """Muon for the matrices, AdamW for the rest; a checkpoint every minute; resumable."""

    model: LlamaForCausalLM
    tok: PreTrainedTokenizerFast
    stream: torch.Tensor
    maker: ChatMaker
    args: argparse.Namespace
    tools: ToolMaker | None = None
    warm: int = 100  # steps over which the learning rate rises

    def optimizers(self) -> list[torch.optim.Optimizer]:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        matrix = [p for name, p in named if p.ndim == 2 and name.endswith("_proj.weight")]
        rest = [p for name, p in named if p.ndim != 2 or not name.endswith("_proj.weight")]
        found: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if matrix:
            found.append(torch.optim.Muon(matrix, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
        return found

    def batch(self, phase: Phase, step: int) -> Rows:
        """The tokens and labels of one step; they depend on the seed and the step alone."""
        self.maker.rng, self.maker.drill = random.Random(self.args.seed * 1_000_003 + step), phase.drill
        rng, size, (chats, copies, tools) = self.maker.rng, phase.size + 1, phase.counts()
        ids = windows(self.stream, rng, phase.batch, size)
        parts = [Rows.whole(ids[chats + copies + tools :])]
        if chats:
            parts.insert(0, chat_rows(self.tok, self.maker, chats, size))
        if copies:
            parts.append(copy_rows(rng, self.stream, copies, size))
        if tools and self.tools:
            self.tools.seed(rng.getrandbits(32))
            self.tools.level, self.tools.drill = phase.level, phase.words
            parts.append(tool_rows(self.tools, self.tok, tools, size))
        return Rows.joined(parts)

    def run(self, phases: list[Phase]) -> None:
        """Train through all phases, from the checkpoint where one is asked for."""
        opts, path = self.optimizers(), self.args.checkpoint
        began = self.resume(opts) if self.args.resume and path.exists() else 0
        plan = [(phase, i) for phase in phases for i in range(phase.steps)]
        work = sum(phase.batch * phase.size for phase, _ in plan[began:])
        step_loss = torch.compile(loss_of, dynamic=False) if self.args.compile else loss_of
        word_loss = torch.compile(pointed_loss, dynamic=False) if self.args.compile else pointed_loss
        spelled = spellings(self.tok)
        known = self.model.get_input_embeddings().weight
        pairs = twins(self.tok, self.stream, samples(self.tools)) if self.tools else None
        start = saved = time.monotonic()
        seen, mean = 0, 0.0
        for step, (phase, i) in enumerate(plan[began:], began + 1):
            rate = phase.peak + (phase.final - phase.peak) * i / phase.steps
            for group in (group for opt in opts for group in opt.param_groups):
                group["lr"] = rate * min(1.0, step / self.warm)
            rows = self.batch(phase, step)
            mask = rows.mask() if phase.tools else None  # without one, attention is a third faster
            if phase.guided:
                loss = guided_loss(self.model, rows)
            elif phase.pointed:
                last = slice(-phase.counts()[2], None)
                words = wanted(spelled, rows.ids[last], rows.labels[last], rows.texts[last])
                loss = word_loss(self.model, rows.ids, rows.labels, mask, words)
            else:
                loss = step_loss(self.model, rows.ids, rows.labels, mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            if pairs:
                draw_together(known, pairs, TOGETHER)
            seen += phase.batch * phase.size
            mean = 0.95 * mean + 0.05 * loss.item() if mean else loss.item()
            if step % self.args.log_every == 0 or step == len(plan):
                speed = seen / (time.monotonic() - start)
                print(
                    f"{phase.name:5} step {step:5}/{len(plan)}  loss {mean:.3f}  {speed:6.0f} tokens/s  "
                    f"ETA {(work - seen) / speed / 60:4.1f} min",
                    flush=True,
                )
            if time.monotonic() - saved > 60 or step == len(plan):
                state = [opt.state_dict() for opt in opts]
                torch.save(
                    {"model": self.model.state_dict(), "opts": state, "step": step}, path.with_suffix(".tmp")
                )
                os.replace(path.with_suffix(".tmp"), path)
                saved = time.monotonic()

    def resume(self, opts: list[torch.optim.Optimizer]) -> int:
        """Load the checkpoint; the number of steps it has behind it."""
        saved = torch.load(self.args.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["opts"], strict=True):
            opt.load_state_dict(state)
        print(f"resumed at step {saved['step']} from {self.args.checkpoint}", flush=True)
        return int(saved["step"])
