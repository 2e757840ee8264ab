#!/usr/bin/env python3
"""Train `kvasir-tiny`, the 5-million-parameter model that ships inside Kvasir.

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
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_chat import ChatMaker
from tiny_data import GET_TEXT, HOLD_OUT, Corpus, read_corpus, split
from tiny_exam import copying, exam, print_prose, remembered
from tiny_practice import ToolMaker, samples
from tiny_training import Phase, Trainer, stream_of
from tiny_vocabulary import BOS, END, EOS, PAD, SIZE, make_tokenizer, respelled
from tiny_words import Words
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.5}  # calls stay what is likeliest, prose varies


# ---------------------------------------------------------------- config, files


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE,
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
    ends = {"bos_token_id": BOS, "eos_token_id": [END, EOS], "pad_token_id": PAD}
    atomic(
        out / "generation_config.json",
        json.dumps(SAMPLING | ends, indent=2) + "\n",
    )
    weights = {
        k: v.detach().to(torch.bfloat16).contiguous().clone()
        for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }
    save_weights(weights, out / "model.safetensors")


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


# ---------------------------------------------------------------- tools


def practised(docs: list[str], corpus: Corpus) -> ToolMaker:
    """What makes chats with the tools and words that are practised."""
    return ToolMaker(Words(docs, kept=False), ChatMaker(corpus))


@dataclass
class Lesson:
    """A model with what it is taught from."""

    model: LlamaForCausalLM
    tok: PreTrainedTokenizerFast
    corpus: Corpus
    docs: list[str]
    args: argparse.Namespace

    def study(self) -> None:
        """Teach a new model prose and chat."""
        stream, steps, args = stream_of(self.tok, self.docs), self.args.steps, self.args
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"{len(stream):,} training tokens, {parameters:,} parameters")
        Trainer(self.model, self.tok, stream, ChatMaker(self.corpus), args).run(
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
        save_model(self.model, args.out)

    def respell(self) -> None:
        """Give a model the tokens of tiny_vocabulary, each with what it knew of that spelling."""
        new = make_tokenizer(self.docs + samples(practised(self.docs, self.corpus)), self.args.out)
        known = self.model.get_input_embeddings().weight.detach()
        found = respelled(known, self.tok, new)
        self.model.resize_token_embeddings(len(new), mean_resizing=False)
        self.model.get_input_embeddings().weight.data.copy_(found)
        save_model(self.model, self.args.out)
        self.tok = new

    def practise(self) -> None:
        """Teach a model of prose to copy, then to call tools and answer in JSON."""
        args, chats, tools = self.args, ChatMaker(self.corpus), practised(self.docs, self.corpus)
        steps = args.tool_steps
        Trainer(self.model, self.tok, stream_of(self.tok, self.docs), chats, args, tools, warm=20).run(
            [
                Phase("look", args.copy_steps, 16, 128, 3e-3, 2e-3, copy=0.75, guided=True),
                Phase(
                    "fill",
                    steps // 5,
                    8,
                    512,
                    2e-3,
                    1.6e-3,
                    chat=0.125,
                    tools=0.75,
                    level=0.0,
                    words=0.3,
                    pointed=True,
                ),
                Phase(
                    "both",
                    steps * 3 // 5,
                    8,
                    512,
                    1.6e-3,
                    3e-4,
                    chat=0.125,
                    tools=0.75,
                    words=0.2,
                    pointed=True,
                ),
                Phase("far", steps // 50, 2, 4096, 3e-4, 3e-4, tools=0.5),
                Phase("last", steps // 10, 8, 512, 3e-4, 1e-4, chat=0.25, tools=0.5, words=0.1, pointed=True),
                Phase("far", steps // 50, 4, 2048, 3e-4, 1e-4, tools=0.25),
                Phase("last", steps // 20, 8, 512, 1e-4, 1e-5, chat=0.25, tools=0.5, words=0.1),
            ]
        )
        save_model(self.model, args.out)

    def finish(self) -> None:
        """Rounds of what `practise` ends with, each with far positions after short chats."""
        near = {"chat": 0.25, "tools": 0.5, "words": 0.1, "pointed": True}
        steps, tools = self.args.finish_steps, practised(self.docs, self.corpus)
        stream, chats = stream_of(self.tok, self.docs), ChatMaker(self.corpus)
        Trainer(self.model, self.tok, stream, chats, self.args, tools, warm=20).run(
            [
                Phase("last", steps * 5 // 16, 8, 512, 6e-4, 4e-4, **near),
                Phase("far", steps * 3 // 32, 2, 4096, 4e-4, 4e-4, tools=0.5),
                Phase("last", steps * 5 // 16, 8, 512, 4e-4, 2e-4, **near),
                Phase("far", steps * 3 // 40, 2, 4096, 2e-4, 2e-4, tools=0.5),
                Phase("last", steps * 3 // 16, 8, 512, 2e-4, 1e-4, **near),
                Phase("far", steps // 20, 4, 2048, 1e-4, 5e-5, tools=0.25),
                Phase("far", steps // 40, 2, 4096, 5e-5, 1e-5, tools=0.5),
            ]
        )
        save_model(self.model, self.args.out)

    def evaluate(self) -> None:
        """Print the right answers by kind: of tools and schemas that were not practised, with words that
        were and with others; and of the known tools of tiny_everyday, with values drawn anew."""
        token, span = copying(self.model, random.Random(self.args.seed))
        right, asked = remembered(self.model, self.tok)
        print(f"{right} of {asked} questions of TALK have their answer", flush=True)
        print(f"copies {token:.0%} of random tokens, {span:.0%} of spans of 8", flush=True)
        for name, kept, known in (
            ("known words", False, 0.0),
            ("new words", True, 0.0),
            ("known tools", False, 1.0),
        ):
            maker = ToolMaker(Words(self.docs, kept), ChatMaker(self.corpus), kept=not known)
            maker.known = known
            for kind, right in exam(self.model, self.tok, maker, self.args.cases, self.args.show).items():
                counts = "  ".join(f"{key} {count:3}" for key, count in right.items())
                print(f"{name:11}  {kind:14}  of {self.args.cases}: {counts}", flush=True)


# ---------------------------------------------------------------- command line


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
  respell
         give an existing folder the tokens of tiny_vocabulary.py, with what it knew of each spelling
  tools  go on from an existing folder: copying, then calls of tools and answers in JSON
  finish go on from an existing folder: more of the last rows of tools, and rows of 2048 and 4096
         after them (three quarters of an hour on two cores)
  evaluate-tools
         right answers of an existing folder with tools and schemas that it never practised,
         and with known tools
  lora   train the adapter for an existing folder (a few minutes)
  eval   held-out perplexity of an existing folder, by source and by position

where the text comes from (public domain; see README.md of the model):
{GET_TEXT}

example:
  python train_tiny.py train --text-root text --out kvasir-tiny
  python train_tiny.py lora  --text-root text --out kvasir-tiny --lora-out kvasir-tiny-lora""",
    )
    p.add_argument(
        "stage",
        choices=["text", "init", "train", "respell", "tools", "finish", "evaluate-tools", "lora", "eval"],
    )
    p.add_argument("--text-root", type=Path, default=Path("/"), help="where the packages were unpacked (/)")
    p.add_argument("--out", type=Path, default=HERE / "kvasir-tiny", help="model folder (beside this file)")
    p.add_argument("--lora-out", type=Path, default=HERE / "kvasir-tiny-lora", help="adapter folder")
    p.add_argument("--steps", type=int, default=2400, help="steps on prose, 16 rows of 256 tokens (2400)")
    p.add_argument("--chat-steps", type=int, default=320, help="steps of half prose, half chat (320)")
    p.add_argument("--talk-steps", type=int, default=600, help="steps of chat with copying drills (600)")
    p.add_argument("--copy-steps", type=int, default=200, help="steps of spans that come again (200)")
    p.add_argument("--tool-steps", type=int, default=6000, help="steps of tools and JSON (6000)")
    p.add_argument("--finish-steps", type=int, default=1600, help="size of finish: 1600 make 1690 (1600)")
    p.add_argument("--cases", type=int, default=100, help="cases of each kind in evaluate-tools (100)")
    p.add_argument("--show", type=int, default=0, help="wrong answers of each kind to print (0)")
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
        texts = docs + samples(practised(docs, corpus))
        tok, model = make_tokenizer(texts, args.out), new_model(args.seed)
    else:
        tok = PreTrainedTokenizerFast.from_pretrained(args.out)
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    tok.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True  # cut later
    lesson = Lesson(model, tok, corpus, docs, args)
    stages = {
        "init": lambda: save_model(model, args.out),
        "train": lesson.study,
        "respell": lesson.respell,
        "tools": lesson.practise,
        "finish": lesson.finish,
        "evaluate-tools": lesson.evaluate,
        "lora": lambda: train_lora(model, tok, corpus, args),
        "eval": model.eval,
    }
    stages[args.stage]()
    if args.stage in ("train", "respell", "tools", "finish", "eval"):
        print_prose(model.eval(), lesson.tok, held)


if __name__ == "__main__":
    main()
