"""Chat templates, rendered exactly as Hugging Face transformers renders them.

The edge owns templates, so the same messages must give the same text here as in any other tool that
loads the model: a difference is a worse answer without an error. The environment below is the one of
`transformers.utils.chat_template_utils`, without the rest of that library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvasir.config.model_files import chat_template
from kvasir.core.errors import ConfigError, RequestError

Message = Mapping[str, Any]

_PROBE = "kvasir-content-probe"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", *_SPECIAL))


class _Generation(Extension):
    """`{% generation %}` marks an assistant's turn for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the model's special tokens. Raises ConfigError if it does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special = dict(special_tokens)
        self._takes_parts = self._probe_parts()

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, or None when the model has none."""
        source = chat_template(folder)
        return cls(source, special_tokens(folder)) if source else None

    def render(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> str:
        """The prompt for `messages`, ending where the assistant's turn begins.

        `kwargs` are the client's template variables. Raises RequestError when the template refuses the
        conversation, with the template's own words.
        """
        for name in kwargs:
            if name in _RESERVED:
                raise RequestError(
                    f"chat_template_kwargs may not set {name}.",
                    code="invalid_value",
                    param=f"chat_template_kwargs.{name}",
                )
        shown = messages if self._takes_parts else [_flat(message) for message in messages]
        try:
            return self._template.render(
                messages=shown,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **{**self._special, **kwargs},
            )
        # A template is the model's code over the client's data: whatever it raises is about that data.
        except Exception as error:  # noqa: BLE001
            raise RequestError(
                f"The model's chat template refuses the conversation: {error}.",
                code="invalid_value",
                param="messages",
            ) from None

    def _probe_parts(self) -> bool:
        """Whether the template itself takes content as a list of parts."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        self._takes_parts = True
        try:
            shown = self.render([message], {})
        except RequestError:
            return False
        return _PROBE in shown and "'text'" not in shown and '"text"' not in shown


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens that templates may use, from tokenizer_config.json and
    special_tokens_map.json, as transformers reads them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
        for key in _SPECIAL:
            value = config.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _flat(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
