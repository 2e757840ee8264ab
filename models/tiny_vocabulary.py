"""The tokens of `kvasir-tiny`: a word is the same pieces after a space and after a quotation mark.

Why this exists: most of a tool call is copied, from ` Paris` in a question to `"Paris"` in JSON. Where the
space takes part in how a word is cut, as in plain byte-pair encoding, the two begin with other tokens,
and a model has to know the spelling of every word. So words are cut without their space, and the space
is joined to the first piece last of all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tiny_chat import CHAT_TEMPLATE, SPECIALS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, END = 0, 1, 2, 6
SIZE = 6144
PIECES = 3400  # of them: without a space; the others are the most common of these after one
SELDOM = 60  # times that a token comes in 3,000 practice chats, below which it is not learned by itself
SPACE = "Ġ"  # as byte-level encodings write it


def _cut(spaces: bool) -> pre_tokenizers.PreTokenizer:
    """Digits one by one, and runs of letters or signs; `spaces`: with the space before them."""
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    if not spaces:
        parts.insert(0, pre_tokenizers.Split(Regex(" "), "isolated"))
    return pre_tokenizers.Sequence(parts)


def _pieces(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of words without their space."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = _cut(spaces=False)
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=PIECES,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tok


def _after_spaces(tok: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Pieces by how often a space comes before them, the most frequent first."""
    words: Counter[str] = Counter()
    cut = _cut(spaces=True)
    for text in texts:
        words.update(word for word, _ in cut.pre_tokenize_str(text) if word[0] == SPACE and word[1:])
    firsts: Counter[str] = Counter()
    known = tok.model
    for word, count in words.items():
        first = known.tokenize(word[1:])[0].value
        if first[0] != SPACE:
            firsts[first] += count
    return [piece for piece, _ in sorted(firsts.items(), key=lambda each: (-each[1], each[0]))]


def make_tokenizer(texts: list[str], out: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `texts`, saved; completions get <|bos|> from it, chats from their template."""
    base = _pieces(texts)
    model = json.loads(base.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    for piece in _after_spaces(base, texts)[: SIZE - len(vocabulary)]:
        vocabulary[SPACE + piece] = len(vocabulary)
        merges.append((SPACE, piece))
    tok = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tok.add_special_tokens(SPECIALS)
    tok.pre_tokenizer, tok.decoder = _cut(spaces=True), decoders.ByteLevel()
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


def twins(
    tok: PreTrainedTokenizerFast, stream: torch.Tensor, chats: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the same after a space), of letters that `stream` has nearly always after a space,
    and that `chats` have too seldom for them to be learned one by one."""
    vocabulary, counts = tok.get_vocab(), torch.bincount(stream, minlength=len(tok))
    practised = torch.bincount(
        torch.tensor([i for each in tok(chats)["input_ids"] for i in each]), minlength=len(tok)
    )
    pairs = [
        (bare, vocabulary[SPACE + token])
        for token, bare in vocabulary.items()
        if token.isalpha()
        and SPACE + token in vocabulary
        and 20 * counts[bare] < counts[vocabulary[SPACE + token]]
        and practised[bare] < SELDOM
    ]
    bare, spaced = torch.tensor(pairs).T
    return bare, spaced


@torch.no_grad()
def draw_together(known: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor], share: float) -> None:
    """Move the embeddings of tokens towards those of their twins after a space, less what a space makes.

    What is copied out of a sentence into quotes was read after a space. Where all such pairs differ by the
    same, a model that can write one word without its space can write each."""
    bare, spaced = pairs
    step = (known[spaced] - known[bare]).mean(0)
    known[bare] = torch.lerp(known[bare], known[spaced] - step, share)


def respelled(
    known: torch.Tensor, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast
) -> torch.Tensor:
    """Embeddings for the tokens of `new`, of shape (tokens, width), from those of `old`.

    A token that `old` lacks is its twin without or with the space, moved by the mean difference of such
    twins; else the mean of the pieces that `old` makes of it."""
    had = old.get_vocab()
    pairs = [(had[token], had[SPACE + token]) for token in had if SPACE + token in had and token != SPACE]
    bare, spaced = (known[list(part)].mean(0) for part in zip(*pairs, strict=True))
    step = spaced - bare
    found = []
    for token, _ in sorted(new.get_vocab().items(), key=lambda each: each[1]):
        if token in had:
            found.append(known[had[token]])
        elif SPACE + token in had:
            found.append(known[had[SPACE + token]] - step)
        elif token[0] == SPACE and token[1:] in had:
            found.append(known[had[token[1:]]] + step)
        else:
            text = new.convert_tokens_to_string([token])
            found.append(known[old.encode(text, add_special_tokens=False)].mean(0))
    return torch.stack(found)
