"""Every sampling field of the API, each with a request for which it changes kvasir-tiny's output.

Each case is sent to the whole stack and to vLLM alone, with the same prompt ids. A lost field would give the
output of `beside`, the same request without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.kit.models.tiny_tokens import ids

PSALM = ids("<|bos|>And it came to pass")
HELLO = ids("<|bos|><|user|>Hello<|end|><|assistant|>")
"""A chat that begins with Hello, whose answer ends before the token limit."""
(THAT,), (SAID,), (END,) = ids(" that"), ids(" said"), ids("<|end|>")

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
# The model's generation_config.json has a top_p, which vLLM's Python class does not read.
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 24, "seed": 3}


@dataclass(frozen=True)
class Case:
    """`fields` are added to `beside` in the body of a completion, and in vLLM's SamplingParams. `shows`: they
    change the output."""

    name: str
    fields: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=lambda: GREEDY)
    prompt: list[int] = field(default_factory=lambda: PSALM)
    shows: bool = True

    @property
    def body(self) -> dict[str, Any]:
        """The body that a client sends."""
        return {**self.beside, **self.fields}

    @property
    def sampling(self) -> dict[str, Any]:
        """The same for vLLM's Python class."""
        made = self.body
        if "logit_bias" in made:
            made["logit_bias"] = {int(token): bias for token, bias in made["logit_bias"].items()}
        return made


_SHOWN = {**GREEDY, "ignore_eos": True, "max_tokens": 32}

CASES = (
    Case("max_tokens", {"max_tokens": 5}),
    Case("temperature", {"temperature": 0.7}, {**DRAWN, "temperature": 1.5}),
    Case("seed", {"seed": 4}, DRAWN),
    Case("top_p", {"top_p": 0.3}, DRAWN),
    Case("top_k", {"top_k": 2}, DRAWN),
    Case("min_p", {"min_p": 0.3}, DRAWN),
    Case("n", {"n": 3}, DRAWN),
    Case("stop", {"stop": "that"}),
    Case("stop in a list", {"stop": ["decree", "said"]}),
    Case("include_stop_str_in_output", {"include_stop_str_in_output": True}, {**GREEDY, "stop": "that"}),
    Case("stop_token_ids", {"stop_token_ids": [SAID]}),
    Case("min_tokens", {"min_tokens": 12}, {**GREEDY, "stop_token_ids": [THAT]}),
    Case("ignore_eos", {"ignore_eos": True}, {**GREEDY, "max_tokens": 32}, HELLO),
    Case("skip_special_tokens", {"skip_special_tokens": False}, _SHOWN, HELLO),
    # Has an effect only with tokenizers of another kind than this model's.
    Case(
        "spaces_between_special_tokens",
        {"spaces_between_special_tokens": False},
        {**_SHOWN, "skip_special_tokens": False},
        HELLO,
        shows=False,
    ),
    Case("presence_penalty", {"presence_penalty": 2.0}),
    Case("frequency_penalty", {"frequency_penalty": 2.0}),
    Case("repetition_penalty", {"repetition_penalty": 1.8}),
    Case("logit_bias", {"logit_bias": {str(THAT): -100, "100": 1.5}}),
    Case("allowed_token_ids", {"allowed_token_ids": [THAT, SAID, *ids(", the of"), END]}),
    Case("bad_words", {"bad_words": ["that", "said"]}),
)
