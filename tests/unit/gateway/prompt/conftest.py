"""The default model's tokenizer, as Hugging Face's library reads it."""

from __future__ import annotations

import pytest
from tests.kit.gateway.encoders import TINY

from kvasir_platform.gateway.prompt.fast_tokenizer import Reference


@pytest.fixture
def tiny() -> Reference:
    return Reference.from_file(TINY)
