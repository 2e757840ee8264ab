"""The `ray start` command that KubeRay generates for a pod, parsed and run without a shell.

KubeRay passes it in a variable when a pod has a command of its own. The command is shell text of another
program, so only what KubeRay itself writes is accepted: words, quotes, and names of variables.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from typing import Literal

from kvasir.core.errors import ConfigError

COMMAND = "KUBERAY_GEN_RAY_START_CMD"
DEFAULT_PORT = 6379
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_SHELL = frozenset(";&|<>()")


AUTH_MODE, AUTH_FILE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"


def require_token(environ: Mapping[str, str]) -> None:
    """Raises ConfigError unless Ray's processes authenticate each other by a token. Ray reads these variables
    at import, so they cannot be set later."""
    if environ.get(AUTH_MODE) != "token" or not (environ.get(AUTH_FILE) or environ.get(AUTH_TOKEN)):
        raise ConfigError(
            f"anyone who reaches Ray's ports could run code in this pod; set {AUTH_MODE}=token and "
            f"{AUTH_FILE} to the file of the token, in every pod of the cluster"
        )


def ray_start(environ: Mapping[str, str], part: Literal["head", "worker"]) -> list[str]:
    """Return the arguments of the process that runs Ray in this pod, in the foreground. Raises ConfigError if
    the variable is not set, or is not a `ray start` of that part of a cluster."""
    command = environ.get(COMMAND)
    if command is None:
        raise ConfigError(
            f"the variable {COMMAND} is not set: this process starts Ray as KubeRay tells a pod of a "
            'RayCluster with the annotation ray.io/overwrite-container-cmd: "true"'
        )
    words = _words(command)
    options = words[2:]
    is_head = "--head" in options
    joins = any(word == "--address" or word.startswith("--address=") for word in options)
    if words[:2] != ["ray", "start"] or is_head is not (part == "head") or joins is not (part == "worker"):
        wanted = "ray start --head …" if part == "head" else "ray start --address=… …"
        raise ConfigError(f"{COMMAND} must be `{wanted}`, and it is: {command}")
    options = [_expanded(word, environ) for word in options if word != "--block"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]


def option(command: list[str], name: str) -> str | None:
    """Return the value of an option, None if the command does not have it."""
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars="".join(_SHELL))
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"{COMMAND} cannot be parsed ({error}): {command}") from None
    if any(word and set(word) <= _SHELL for word in words) or "`" in command or "$(" in command:
        raise ConfigError(f"{COMMAND} must be one `ray start` command and nothing more, and it is: {command}")
    return words


def _expanded(word: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            raise ConfigError(f"{COMMAND} names the variable {name}, which is not set")
        return environ[name]

    return _NAME.sub(value, word)
