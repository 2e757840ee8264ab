"""What a model makes of media: a rule for each kind that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvasir.checkpoint.media.audio import AudioRule, audio_rule
from kvasir.checkpoint.media.images import ImageRule, image_rule
from kvasir.checkpoint.media.videos import VideoRule, video_rule
from kvasir.checkpoint.model_config import read_model_config
from kvasir.core.media.prompts import MediaKind


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The rules of a model, None for a kind that it does not take."""

    image: ImageRule | None = None
    video: VideoRule | None = None
    audio: AudioRule | None = None

    @property
    def placeholders(self) -> dict[MediaKind, int]:
        """The placeholder of each kind that the model takes."""
        rules = {MediaKind.IMAGE: self.image, MediaKind.VIDEO: self.video, MediaKind.AUDIO: self.audio}
        return {kind: rule.placeholder for kind, rule in rules.items() if rule is not None}


def media_rules(folder: Path) -> MediaRules:
    """Return the rules of the model in `folder`. Raises ConfigError, which names the file, for files that
    cannot be read."""
    raw = read_model_config(folder).raw
    return MediaRules(image_rule(folder), video_rule(raw, folder), audio_rule(raw, folder))
