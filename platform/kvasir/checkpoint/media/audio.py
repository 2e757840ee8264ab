"""How many tokens a model makes of audio, from the model's files and the length of the audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvasir.checkpoint.json_file import read_json_object
from kvasir.core.errors import ConfigError


class AudioRule(Protocol):
    """What a model makes of audio. `placeholder` is the token that stands for an audio file in the chat
    template, and for each of its tokens in a prompt; `rate` are the samples of a second that the model
    takes, of one channel."""

    @property
    def placeholder(self) -> int: ...

    @property
    def rate(self) -> int: ...

    def tokens(self, samples: int) -> int:
        """Return the number of tokens of that many samples. Raises ValueError with the reason for a length
        that the model does not take."""
        ...


@dataclass(frozen=True, slots=True)
class HalvedFrames:
    """A frame of the spectrum for each `hop` samples, then a convolution and a pooling that halve their
    number, as in Qwen2-Audio (transformers, Qwen2AudioProcessor). The model hears `max_samples`."""

    placeholder: int
    rate: int
    hop: int
    max_samples: int

    def tokens(self, samples: int) -> int:
        """See AudioRule."""
        if samples > self.max_samples:
            raise ValueError(
                f"it has {samples / self.rate:.1f} s; the model hears {self.max_samples / self.rate:g} s"
            )
        frames = -(-samples // self.hop)
        found = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if found < 1:
            raise ValueError(f"it is too short, with {samples / self.rate:.3f} s")
        return found


def audio_rule(raw: Mapping[str, Any], folder: Path) -> AudioRule | None:
    """Return what the model in `folder` with the configuration `raw` makes of audio, None for a model that
    takes none, or of a family whose rule is not known. Raises ConfigError, which names the file, for files
    that cannot be read."""
    path = folder / "preprocessor_config.json"
    placeholder = raw.get("audio_token_index", raw.get("audio_token_id"))
    if raw.get("model_type") != "qwen2_audio" or not isinstance(placeholder, int) or not path.is_file():
        return None
    stated = read_json_object(path)
    defaults = {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
    read = [stated.get(name, default) for name, default in defaults.items()]
    if not all(isinstance(each, int) and each > 0 for each in read):
        raise ConfigError(f"{path}: sampling_rate, hop_length or chunk_length is no number")
    rate, hop, seconds = read
    return HalvedFrames(placeholder, rate, hop, seconds * rate)
