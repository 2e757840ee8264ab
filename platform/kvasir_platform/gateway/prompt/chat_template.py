"""Chat templates, rendered exactly as Hugging Face transformers renders them.

The edge renders templates, so equal messages must give the same text as in any other tool that loads the
model: a difference lowers quality without an error. The environment below is that of
`transformers.utils.chat_template_utils`, without the rest of that library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvasir.config.load.model_files import chat_template
from kvasir.core.errors import ConfigError, RequestError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_PROBE = "kvasir-content-probe"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        *_SPECIAL,
    )
)
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the text to continue, and searched for in the prompt. It begins with a space: templates that
strip it strip trailing space of the text too."""
_CLIENT_TEMPLATES = 8
_KINDS = 8
"""Maximum number of cached client templates."""


class _Generation(Extension):
    """`{% generation %}` marks an assistant's turn for training; for serving it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the model's special tokens; `tool_source` is the template for chats with
    tools if the model has a separate one. Raise ConfigError if one does not compile."""

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
            for template in (self._template, self._with_tools):
                # Every rendering copies them, and lookups in a ChainMap are slow.
                template.globals = dict(template.globals)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._special = dict(special_tokens)
        self._now = now
        self._knows_developers = "'developer'" in source or '"developer"' in source
        self.takes_documents = "documents" in names
        self._takes_parts = self._takes_strings = True
        self._takes_strings = self._probe(_PROBE)
        self._takes_parts = self._probe([{"type": "text", "text": _PROBE}])
        self._of_clients = lru_cache(_CLIENT_TEMPLATES)(self._compiled)
        self._shows_media = lru_cache(_KINDS)(self._shows)

    def takes(self, kind: str) -> bool:
        """Return whether the template shows where an item of media is: `image`, `video` or `audio`."""
        return self._shows_media(kind)

    def _shows(self, kind: str) -> bool:
        if not self._takes_parts:
            return False
        text = {"type": "text", "text": _PROBE}
        try:
            plain, pictured = (
                self.render([{"role": "user", "content": content}], {})
                for content in ([text], [{"type": kind}, text])
            )
        except RequestError:
            return False
        return len(pictured) > len(plain)

    @classmethod
    def from_folder(cls, folder: Path, template: str | None = None) -> ChatTemplate | None:
        """Return the template of a model folder, or None if it has none. `template` replaces the model's
        own."""
        if template is not None:
            return cls(template, special_tokens(folder))
        source = chat_template(folder)
        if not source:
            return None
        return cls(source, special_tokens(folder), tool_source=chat_template(folder, tools=True))

    def of_client(self, source: str) -> ChatTemplate:
        """Return a client's template with this model's special tokens. Raise RequestError if it does not
        compile."""
        try:
            return self._of_clients(source)
        except ConfigError as error:
            raise RequestError(
                f"chat_template: {error.message}.", code="invalid_value", param="chat_template"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
        tools: Sequence[Tool] | None = None,
        *,
        documents: Sequence[Mapping[str, str]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt for `messages`, with the beginning of the assistant's turn; without
        `add_generation_prompt` it ends after the last message, with `continue_final_message` at the end of
        the last message's text.

        `kwargs` are the client's template variables, `tools` the available functions and `documents` the
        texts to refer to, in the form of OpenAI and transformers. Raise RequestError with the template's
        message if it rejects the conversation.
        """
        for name in kwargs:
            if name in _RESERVED:
                raise RequestError(
                    f"chat_template_kwargs may not set {name}.",
                    code="invalid_value",
                    param=f"chat_template_kwargs.{name}",
                )
        shown = messages if self._knows_developers else _as_systems(messages)
        if not self._takes_parts:
            shown = [_flat(message) for message in shown]
        elif not self._takes_strings:
            shown = [_in_parts(message) for message in shown]
        if continue_final_message:
            shown = [*shown[:-1], _tagged(shown[-1])]
        try:
            text = (self._with_tools if tools else self._template).render(
                messages=shown,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **kwargs},
            )
        # A template is the model's code over the client's data: that data caused any exception.
        except Exception as error:  # noqa: BLE001
            raise RequestError(
                f"The model's chat template refuses the conversation: {error}.",
                code="invalid_value",
                param="messages",
            ) from None
        return _cut_at_tag(text, shown[-1]) if continue_final_message else text

    def _compiled(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self._special, self._now)

    def _probe(self, content: str | list[dict[str, str]]) -> bool:
        """Return whether the template itself handles content of this form."""
        try:
            shown = self.render([{"role": "user", "content": content}], {})
        except RequestError:
            return False
        return _PROBE in shown and "'text'" not in shown and '"text"' not in shown


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the named special tokens for templates, as transformers reads them: special_tokens_map.json
    takes precedence over tokenizer_config.json unless the latter has `added_tokens_decoder`. Raise
    ConfigError for invalid JSON."""
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
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or message["role"] == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _as_systems(messages: Sequence[Message]) -> Sequence[Message]:
    """Convert developer messages to system messages for templates without that role. Such templates require a
    single system message at the beginning, so all are joined."""
    if "developer" not in [message["role"] for message in messages]:
        return messages
    is_system = [message["role"] in ("developer", "system") for message in messages]
    if is_system[0] and sum(is_system) == 1:
        return [{**messages[0], "role": "system"}, *messages[1:]]
    texts = [_flat(message)["content"] for message, system in zip(messages, is_system, strict=True) if system]
    rest = [message for message, system in zip(messages, is_system, strict=True) if not system]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *rest]


def _tagged(message: Message) -> Message:
    """Return `message` with the tag appended to the text of its last part."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUED}
    if not content:
        raise _not_continued("it has no content")
    if "text" not in content[-1]:
        raise _not_continued("it ends with an image, a video or audio")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUED}]}


def _cut_at_tag(prompt: str, last: Message) -> str:
    """Return `prompt` up to the tag, which `last` contained."""
    content = last["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    at = prompt.rfind(_CONTINUED.strip())
    if at < 0 or text.removesuffix(_CONTINUED).strip() not in prompt:
        raise _not_continued("the model's chat template does not show its text as it is")
    return prompt[:at] if prompt.startswith(_CONTINUED, at) else prompt[:at].rstrip()


def _not_continued(why: str) -> RequestError:
    return RequestError(
        f"The final message cannot be continued: {why}.",
        code="invalid_value",
        param="continue_final_message",
    )


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
