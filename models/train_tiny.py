#!/usr/bin/env python3
"""Train `kvasir-tiny`, the 4-million-parameter model that ships inside Kvasir.

Why this exists: a serving platform that cannot answer before somebody downloads a
checkpoint cannot be tried, tested or demonstrated offline. This file makes, on a CPU
and from public-domain text only, a real Llama-architecture model small enough to commit
(about 9 MB) whose English can be read, that follows a chat template, and that stops at
its end-of-turn token. It is not meant to be clever; it is meant to be honest and present.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_chat import CHAT_TEMPLATE, SPECIALS, ChatMaker
from tiny_data import GET_TEXT, HOLD_OUT, Corpus, read_corpus, split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
BOS, EOS, PAD, END = 0, 1, 2, 6


# ---------------------------------------------------------------- tokenizer, config, files


def make_tokenizer(docs: list[str], out: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE; completions get <|bos|> from the post-processor, chat from its template."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        docs,
        trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tok.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BOS]} $A", pair=f"{SPECIALS[BOS]} $A $B", special_tokens=[(SPECIALS[BOS], BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[END],
        pad_token=SPECIALS[PAD],
        additional_special_tokens=[SPECIALS[EOS], *SPECIALS[3:6], SPECIALS[7]],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out, save_jinja_files=False)
    written = json.loads((out / "tokenizer_config.json").read_text())
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(written, indent=2) + "\n")
    names = {key: written[key] for key in ("bos_token", "eos_token", "pad_token")}
    (out / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")
    return fast


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=[END, EOS],
            pad_token_id=PAD,
            attention_dropout=0.0,
        )
    )


def atomic(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path.with_suffix(".tmp"), metadata={"format": "pt"})
    path.with_suffix(".tmp").chmod(0o644)
    os.replace(path.with_suffix(".tmp"), path)


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """config, generation config and bf16 weights; each file replaced in one step."""
    keys = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "rope_parameters",
        "attention_bias",
        "attention_dropout",
        "mlp_bias",
    ]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "rope_theta": 10000.0,
    } | {key: getattr(model.config, key) for key in keys}
    atomic(out / "config.json", json.dumps(config, indent=2) + "\n")
    atomic(
        out / "generation_config.json",
        json.dumps({"bos_token_id": BOS, "eos_token_id": [END, EOS], "pad_token_id": PAD}, indent=2) + "\n",
    )
    weights = {
        k: v.detach().to(torch.bfloat16).contiguous().clone()
        for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }
    save_weights(weights, out / "model.safetensors")


# ---------------------------------------------------------------- training


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def stream_of(tok: PreTrainedTokenizerFast, docs: list[str]) -> torch.Tensor:
    """All documents as one token line: <|bos|> text <|eos|> <|bos|> text <|eos|> ..."""
    return torch.tensor([t for ids in tok(docs)["input_ids"] for t in (*ids, EOS)])


def windows(stream: torch.Tensor, rng: random.Random, batch: int, size: int) -> torch.Tensor:
    starts = [rng.randrange(len(stream) - size) for _ in range(batch)]
    return torch.stack([stream[s : s + size] for s in starts])


def chat_rows(
    tok: PreTrainedTokenizerFast, maker: ChatMaker, batch: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of packed conversations; only the assistant's words and <|end|> are learned."""
    ids, labels = torch.full((batch, size), PAD), torch.full((batch, size), -100)
    for row in range(batch):
        at = 0
        while at < size:
            for text, learn in maker.conversation():
                part = torch.tensor(tok.encode(text, add_special_tokens=False))[: size - at]
                ids[row, at : at + len(part)] = part
                if learn:
                    labels[row, at : at + len(part)] = part
                at += len(part)
    return ids, labels


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


@dataclass
class Trainer:
    """Muon for the matrices, AdamW for the rest; a checkpoint every minute; resumable."""

    model: LlamaForCausalLM
    tok: PreTrainedTokenizerFast
    stream: torch.Tensor
    maker: ChatMaker
    args: argparse.Namespace

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

    def batch(self, phase: Phase, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and labels of one step; they depend on the seed and the step alone."""
        self.maker.rng, self.maker.drill = random.Random(self.args.seed * 1_000_003 + step), phase.drill
        ids = windows(self.stream, self.maker.rng, phase.batch, phase.size + 1)
        if not (chats := int(phase.batch * phase.chat)):
            return ids, ids
        talk, learn = chat_rows(self.tok, self.maker, chats, phase.size + 1)
        return torch.cat([talk, ids[chats:]]), torch.cat([learn, ids[chats:]])

    def run(self, phases: list[Phase]) -> None:
        """Train through all phases, from the checkpoint where one is asked for."""
        opts, path = self.optimizers(), self.args.checkpoint
        began = self.resume(opts) if self.args.resume and path.exists() else 0
        plan = [(phase, i) for phase in phases for i in range(phase.steps)]
        work = sum(phase.batch * phase.size for phase, _ in plan[began:])
        step_loss = torch.compile(loss_of, dynamic=False) if self.args.compile else loss_of
        start = saved = time.monotonic()
        seen, mean = 0, 0.0
        for step, (phase, i) in enumerate(plan[began:], began + 1):
            rate = phase.peak + (phase.final - phase.peak) * i / phase.steps
            for group in (group for opt in opts for group in opt.param_groups):
                group["lr"] = rate * min(1.0, step / 100)
            loss = step_loss(self.model, *self.batch(phase, step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
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


# ---------------------------------------------------------------- adapter


class Lora(torch.nn.Module):
    """A linear layer with a low-rank addition; PEFT's names and scaling."""

    def __init__(self, base: torch.nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def train_lora(
    model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, corpus: Corpus, args: argparse.Namespace
) -> None:
    """A rank-8 adapter on q_proj and v_proj that answers everything with a Bible verse."""
    torch.manual_seed(args.seed)
    model.requires_grad_(False)
    found = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            lora = Lora(getattr(layer.self_attn, name), rank=8, alpha=32)
            setattr(layer.self_attn, name, lora)
            found[f"base_model.model.model.layers.{i}.self_attn.{name}"] = lora
    stream = stream_of(tok, [doc for i, doc in enumerate(corpus.docs["kjv"]) if i % HOLD_OUT])
    args.checkpoint = args.checkpoint.with_name("lora-" + args.checkpoint.name)
    Trainer(model, tok, stream, ChatMaker(corpus, voice="scripture"), args).run(
        [Phase("lora", args.lora_steps, 8, 256, 4e-3, 2e-4, chat=0.5)]
    )
    args.lora_out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"{at}.lora_{part.upper()}.weight": getattr(lora, part).detach().to(torch.bfloat16)
        for at, lora in found.items()
        for part in "ab"
    }
    save_weights(weights, args.lora_out / "adapter_model.safetensors")
    (args.lora_out / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "kvasir-tiny",
                "r": 8,
                "lora_alpha": 32,
                "lora_dropout": 0.0,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
                "modules_to_save": None,
            },
            indent=2,
        )
        + "\n"
    )


# ---------------------------------------------------------------- command line


@torch.no_grad()
def perplexity(
    model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, docs: list[str], size: int
) -> tuple[float, int]:
    """(perplexity, tokens) over whole documents, cut at `size` tokens."""
    total, count = 0.0, 0
    for doc in docs:
        ids = torch.tensor([[*tok(doc)["input_ids"][: size - 1], EOS]])
        total += loss_of(model, ids, ids).item() * (ids.numel() - 1)
        count += ids.numel() - 1
    return float(torch.tensor(total / max(1, count)).exp()), count


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=f"""\
what each stage does:
  text   read the books and count them; the quickest way to see that all text is there
  init   write a complete folder with random weights (seconds): enough to test loading
  train  tokenizer, prose at 256 tokens, prose at 2048 and 4096, chat, then both at
         2048 and 4096 (short chats unlearn far positions), a last round of chat (50 minutes)
  lora   train the adapter for an existing folder (a few minutes)
  eval   held-out perplexity of an existing folder, by source

where the text comes from (public domain; see README.md of the model):
{GET_TEXT}

example:
  python train_tiny.py train --text-root text --out kvasir-tiny
  python train_tiny.py lora  --text-root text --out kvasir-tiny --lora-out kvasir-tiny-lora""",
    )
    p.add_argument("stage", choices=["text", "init", "train", "lora", "eval"])
    p.add_argument("--text-root", type=Path, default=Path("/"), help="where the packages were unpacked (/)")
    p.add_argument("--out", type=Path, default=HERE / "kvasir-tiny", help="model folder (beside this file)")
    p.add_argument("--lora-out", type=Path, default=HERE / "kvasir-tiny-lora", help="adapter folder")
    p.add_argument("--steps", type=int, default=2400, help="steps on prose, 4096 tokens each (2400)")
    p.add_argument("--chat-steps", type=int, default=320, help="steps of half prose, half chat (320)")
    p.add_argument("--talk-steps", type=int, default=600, help="steps of chat with copying drills (600)")
    p.add_argument("--lora-steps", type=int, default=200, help="steps for the adapter (200)")
    p.add_argument("--seed", type=int, default=7, help="of weights, batches and conversations (7)")
    p.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    p.add_argument("--compile", action="store_true", help="a third faster; needs a C++ compiler")
    p.add_argument("--log-every", type=int, default=20, help="steps between progress lines (20)")
    p.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "kvasir-tiny.ckpt",
        help="where a run can be taken up again (in the temporary folder)",
    )
    p.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    return p.parse_args(argv)


def main() -> None:
    """Read the books, then do the stage that was asked for."""
    args = parse()
    torch.set_num_threads(args.threads)
    corpus = read_corpus(args.text_root)
    docs, held = split(corpus)
    for name, texts in corpus.docs.items():
        print(f"{name:7} {len(texts):5} documents  {sum(map(len, texts)):9,} characters", flush=True)
    if args.stage == "text":
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage in ("init", "train"):
        tok, model = make_tokenizer(docs, args.out), new_model(args.seed)
    else:
        tok = PreTrainedTokenizerFast.from_pretrained(args.out)
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    tok.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True  # cut later
    if args.stage == "init":
        save_model(model, args.out)
    elif args.stage == "lora":
        train_lora(model, tok, corpus, args)
    elif args.stage == "train":
        stream, steps = stream_of(tok, docs), args.steps
        print(f"{len(stream):,} training tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
        Trainer(model, tok, stream, ChatMaker(corpus), args).run(
            [
                Phase("prose", steps, 16, 256, 4e-3, 8e-4),
                Phase("long", steps // 20, 2, 2048, 8e-4, 5e-4),
                Phase("long", steps // 60, 1, 4096, 5e-4, 4e-4),
                Phase("chat", args.chat_steps, 8, 512, 8e-4, 3e-5, chat=0.5),
                Phase("talk", args.talk_steps, 16, 256, 1e-3, 2e-5, chat=0.875, drill=0.35),
                Phase("mend", steps // 15, 2, 2048, 6e-4, 2e-4, chat=0.5),
                Phase("mend", steps // 60, 2, 4096, 2e-4, 2e-5, chat=0.5),
                Phase("last", steps // 20, 16, 256, 3e-4, 1e-5, chat=0.75),
            ]
        )
        save_model(model, args.out)
    if args.stage in ("train", "eval"):
        model.eval()
        held["all"] = [doc for texts in held.values() for doc in texts]
        for name, texts in held.items():
            value, count = perplexity(model, tok, texts, 2048)
            print(f"held out {name:7} {count:7,} tokens  perplexity {value:7.2f}", flush=True)


if __name__ == "__main__":
    main()
