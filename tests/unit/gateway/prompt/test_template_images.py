"""Which chat templates have a place for images."""

from __future__ import annotations

import pytest

from kvasir_platform.gateway.prompt.chat_template import ChatTemplate

PARTS = "{% for message in messages %}{% for part in message.content %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        (PARTS + "{% if part.type == 'text' %}{{ part.text }}{% endif %}" + END, False),
        (PARTS + "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}" + END, True),
        # A template that refuses images does not keep its model from being served.
        (
            PARTS
            + "{% if part.type != 'text' %}{{ raise_exception('text only') }}{% endif %}{{ part.text }}"
            + END,
            False,
        ),
    ],
)
def test_a_template_takes_images_if_it_shows_them(source: str, takes: bool) -> None:
    assert ChatTemplate(source, {}).takes("image") is takes
