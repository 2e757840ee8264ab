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
Tool = Mapping[str, Any]

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
    """One compiled template with the model's special tokens; `tool_source` is the one for chats with tools
    where the model has another. Raises ConfigError if one does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        *,
        tool_source: str | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._with_tools = self._template if tool_source is None else environment.from_string(tool_source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special = dict(special_tokens)
        self._takes_parts = self._probe_parts()

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, or None when the model has none."""
        source = chat_template(folder)
        if not source:
            return None
        return cls(source, special_tokens(folder), tool_source=chat_template(folder, tools=True))

    def render(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], tools: Sequence[Tool] | None = None
    ) -> str:
        """The prompt for `messages`, ending where the assistant's turn begins.

        `kwargs` are the client's template variables, `tools` what the model may call, in OpenAI's form.
        Raises RequestError when the template refuses the conversation, with the template's own words.
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
            return (self._with_tools if tools else self._template).render(
                messages=shown,
                tools=tools,
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
    """The named special tokens that templates may use, as transformers reads them: special_tokens_map.json
    counts before tokenizer_config.json, but only where the latter lists no `added_tokens_decoder`. Raises
    ConfigError for unreadable JSON."""
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = config | _read(folder / "special_tokens_map.json")
    named = {key: config.get(key) for key in _SPECIAL}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


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
