"""Images in prompts: where they are among the tokens, what keeps them apart, and what their headers say."""

from __future__ import annotations

import hashlib
import random
from array import array

import pytest
from tests.kit.media.image_files import bomb, gif, jpeg, webp

from kvasir.core.media.images import image_header
from kvasir.core.media.prompts import MediaKind, PromptMedia, collapsed, expanded

PLACE = 99
PLACES = {MediaKind.IMAGE: PLACE}


def image(length: int, name: bytes = b"cat") -> PromptMedia:
    return PromptMedia(0, length, hashlib.sha256(name).digest(), name)


def test_placeholders_become_the_tokens_of_their_images_and_back() -> None:
    tokens = array("I", [1, PLACE, 2, 3, PLACE, PLACE, 4])
    made, placed = expanded(tokens, PLACES, [image(3), image(1), image(2)])
    assert made.tolist() == [1, *[PLACE] * 3, 2, 3, PLACE, *[PLACE] * 2, 4]
    assert [(each.offset, each.length) for each in placed] == [(1, 3), (6, 1), (7, 2)]
    assert collapsed(made, PLACES, placed) == tokens
    # Output after the prompt may have the placeholder, and stays as it is.
    assert collapsed(made + array("I", [PLACE]), PLACES, placed) == tokens + array("I", [PLACE])


@pytest.mark.parametrize("found", [0, 2])
def test_there_is_one_placeholder_for_each_image(found: int) -> None:
    with pytest.raises(ValueError, match=f"{found} placeholders for 1 images"):
        expanded(array("I", [1] + [PLACE] * found), PLACES, [image(3)])


@pytest.mark.parametrize("places", [[(0, 2)], [(1, 4)], [(1, 0)], [(1, 3), (1, 3)], [(50, 2)]])
def test_an_image_is_only_where_its_placeholders_are(places: list[tuple[int, int]]) -> None:
    tokens = array("I", [1, PLACE, PLACE, PLACE, 2])
    images = [PromptMedia(offset, length, b"", b"") for offset, length in places]
    with pytest.raises(ValueError, match="are not those of an image"):
        collapsed(tokens, PLACES, images)


def test_keys_differ_between_images_and_between_salts() -> None:
    keys = {image(1, name).key(salt) for name in (b"cat", b"dog") for salt in ("", "red", "blue")}
    assert len(keys) == 6
    assert image(1).key("red") == image(7).key("red")


def test_what_is_in_an_image_is_in_no_log() -> None:
    assert "secret" not in repr(PromptMedia(0, 1, b"d", b"secret"))


@pytest.mark.parametrize(("make", "form"), [(bomb, "PNG"), (jpeg, "JPEG"), (gif, "GIF"), (webp, "WEBP")])
@pytest.mark.parametrize("size", [(1, 1), (640, 480), (16_000, 9_000)])
def test_a_header_tells_format_and_dimensions(make: object, form: str, size: tuple[int, int]) -> None:
    assert callable(make)
    assert image_header(make(*size)) == (form, *size)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg/>", b"BM" + bytes(60), b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"]
)
def test_other_and_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"none of|damaged"):
        image_header(data)


def test_damaged_headers_end_in_a_reason_and_nothing_else() -> None:
    rng = random.Random(27)
    for make in (bomb, jpeg, gif, webp):
        whole = make(320, 200)
        for _ in range(300):
            data = bytearray(whole[: rng.randrange(len(whole) + 1)])
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                header = image_header(bytes(data))
            except ValueError:
                continue
            assert header.width > 0 < header.height


@pytest.mark.parametrize("endless", [b"\xff\xe0\x00\x02", b"\xff\x01", b"\xff"])
def test_a_jpeg_whose_frame_comes_late_is_given_up(endless: bytes) -> None:
    frame = jpeg(8, 8)[2:]
    assert image_header(b"\xff\xd8" + endless * 500 + frame) == ("JPEG", 8, 8)
    with pytest.raises(ValueError, match="damaged"):
        image_header(b"\xff\xd8" + endless * 1_500 + frame)
