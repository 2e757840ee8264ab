"""Forms of uploads, as clients send them and as they are not to be."""

from __future__ import annotations

import pytest

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.batches.form import parse_form

TYPE = "multipart/form-data; boundary=XX"


def part(name: str, content: bytes, filename: str = "") -> bytes:
    file = f'; filename="{filename}"'.encode() if filename else b""
    return b'--XX\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
        name.encode(),
        file,
        content,
    )


def test_fields_and_files_are_found_by_name() -> None:
    form = parse_form(
        part("purpose", b"batch") + part("file", b"a\r\nb--XX\n", "a b.jsonl") + b"--XX--\r\n", TYPE
    )
    assert form["purpose"].text == "batch"
    assert bytes(form["file"].content) == b"a\r\nb--XX\n"
    assert form["file"].filename == "a b.jsonl"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--YY--",
        b"--XX",
        part("a", b"x"),
        b"--XX\r\n\r\nno name\r\n--XX--",
        b"--XXa\r\n" + part("a", b"x") + b"--XX--",
        b"".join(part(f"f{i}", b"x") for i in range(17)) + b"--XX--",
        b"--XX\r\nx: " + b"y" * 5000 + b"\r\n\r\nx\r\n--XX--",
    ],
)
def test_a_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_form(body, TYPE)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=XX"])
def test_another_type_is_refused(kind: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_form(part("a", b"x") + b"--XX--", kind)
    assert refused.value.status == 415
