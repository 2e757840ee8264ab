"""How two texts become one input of a cross-encoder, token for token as vLLM builds it.

Encoders take both texts with special tokens around and between them, which the tokenizer's post-processor
adds; which, is read off one pair, so that each text is tokenized alone, and a query once for all documents.
Language models that rank take one text, made by a template or of both texts in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from kvasir.checkpoint.classes import Classes
from kvasir.config.load.model_files import returns_types
from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.prompt.chat_template import ChatTemplate
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens
from kvasir_platform.gateway.prompt.fast_tokenizer import encoded_pair

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class PairForm:
    """The ids before, between and after the tokens of two texts. `first_type` is the number of ids between
    them that belong to the first text; None: the model has no token types."""

    before: array[int]
    between: array[int]
    after: array[int]
    first_type: int | None

    @property
    def added(self) -> int:
        """The number of ids that are of neither text."""
        return len(self.before) + len(self.between) + len(self.after)

    def joined(self, first: array[int], second: array[int]) -> tuple[array[int], int | None]:
        """Return the ids of a pair, and the index at which token types change, None without types."""
        ids = self.before + first + self.between + second + self.after
        if self.first_type is None:
            return ids, None
        return ids, len(self.before) + len(first) + self.first_type


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model that classifies. `pairs` is how it takes two texts; if it is None they are one text, rendered
    by `template`, or one after the other."""

    classes: Classes
    pairs: PairForm | None = None
    template: ChatTemplate | None = None


def classifier_of(classes: Classes, folder: Path, template: str | None) -> Classifier:
    """Return the classifier in a model folder. `template` is a template of the spec, for messages of the
    roles query and document; vLLM does not use the model's own. Raise ConfigError for an invalid
    tokenizer."""
    if template is not None:
        return Classifier(classes, template=ChatTemplate.from_folder(folder, template))
    if not classes.separated:
        return Classifier(classes)
    typed = classes.typed and returns_types(folder)
    return Classifier(classes, pairs=pair_form(folder / "tokenizer.json", typed=typed))


def pair_form(path: Path, *, typed: bool) -> PairForm:
    """Return the form of pairs of the tokenizer in a file. `typed`: the model has token types. Raise
    ConfigError if its texts cannot be told apart."""
    numbers, types, of = encoded_pair(path, _PROBE, _PROBE)
    if 0 not in of or 1 not in of:
        raise ConfigError(f"{path} makes no pair of two texts; choose another model")
    first_end = len(of) - of[::-1].index(0)
    second, second_end = of.index(1), len(of) - of[::-1].index(1)
    ids = array("I", numbers)
    return PairForm(
        before=ids[: of.index(0)],
        between=ids[first_end:second],
        after=ids[second_end:],
        first_type=types[first_end:second].count(0) if typed and types[second] else None,
    )


def pair_texts(
    texts: tuple[Sequence[str], Sequence[str]], template: ChatTemplate | None, control: ControlTokens | None
) -> list[str]:
    """Return each pair as one text: a UserText if, with `control`, clients wrote control tokens. One text of
    the first list goes with each of the second. Raise RequestError if the template refuses a pair."""
    first, second = texts
    pairs = zip(repeat(first[0], len(second)) if len(first) == 1 else first, second, strict=True)
    if template is None:
        return [one + other if control is None else control.prompt(one + other) for one, other in pairs]

    def render(messages: Sequence[Any], _: Sequence[Any]) -> str:
        return template.render(messages, {}, add_generation_prompt=False)

    shown = (
        [{"role": "query", "content": one}, {"role": "document", "content": other}] for one, other in pairs
    )
    return [render(pair, ()) if control is None else control.rendered(pair, (), render) for pair in shown]


def kept_of_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many of the tokens of two texts are kept where there is `room` for so many: the longer text
    is cut first, as Hugging Face's `longest_first` does."""
    if first + second <= room:
        return first, second
    less, more = sorted((first, second))
    more = less if less > room else max(less, room - less)
    if less + more > room:
        less = room // 2
        more = less + room % 2
    return (less, more) if first <= second else (more, less)
