"""The base class and shared types of the deployment spec."""

from __future__ import annotations

import ast
import inspect
import ipaddress
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]


class Spec(BaseModel):
    """Base class of all parts of the spec: frozen, unknown fields are rejected, attributes are documented."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by the docstring below it. Pydantic's `use_attribute_docstrings` reads the
        source of every class when it is imported: a third of the time of that, in each process."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for kind in reversed(cls.__mro__):
            if kind is not Spec and issubclass(kind, Spec):
                for name, text in _attribute_docs(kind).items():
                    if name in properties:
                        properties[name]["description"] = text
        return schema


def _attribute_docs(kind: type[Spec]) -> dict[str, str]:
    """Return the docstring below each annotated attribute that has one."""
    (source,) = ast.parse(dedent(inspect.getsource(kind))).body
    found: dict[str, str] = {}
    for attribute, text in pairwise(getattr(source, "body", ())):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = inspect.cleandoc(said)
    return found


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
