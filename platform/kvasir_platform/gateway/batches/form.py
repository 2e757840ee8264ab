"""Parses the form of an upload (RFC 7578, multipart/form-data) that has been received as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from kvasir.core.errors import RequestError

_MAX_PARTS = 16
_MAX_HEAD = 4096


@dataclass(frozen=True, slots=True)
class FormPart:
    """A field of a form. `filename` is empty for a field that is no file."""

    content: memoryview
    filename: str = ""

    @property
    def text(self) -> str:
        """The content as text."""
        return bytes(self.content[:_MAX_HEAD]).decode("utf-8", "replace")


def parse_form(body: bytes, content_type: str) -> Mapping[str, FormPart]:
    """Return the fields of a form by name. `content_type` is the header of the request. Raise
    RequestError."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise RequestError(
            "Send the file as multipart/form-data with a boundary.", status=415, code="unsupported_media_type"
        )
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    whole, found = memoryview(body), dict[str, FormPart]()
    if not body.startswith(delimiter):
        raise _malformed("it does not begin with its boundary")
    at = len(delimiter)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _malformed("a boundary does not end its line")
        end = body.find(b"\r\n" + delimiter, at)
        split = body.find(b"\r\n\r\n", at, at + _MAX_HEAD)
        if end < 0 or split < 0 or split > end or len(found) == _MAX_PARTS:
            raise _malformed("a part is not complete, or there are too many")
        headers = BytesHeaderParser().parsebytes(body[at + 2 : split + 4])
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _malformed("a part has no name")
        found[name] = FormPart(whole[split + 4 : end], headers.get_filename() or "")
        at = end + 2 + len(delimiter)
    return found


def _malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", code="invalid_value", param="file")
