"""Which media a deployment serves: those that its model has a rule for, within the limits of the spec.

Gateways measure what clients send, and workers what gateways send, with the same code: from headers, before
anything is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.checkpoint.media.rules import MediaRules
from kvasir.config.spec.edge import GatewaySpec
from kvasir.config.spec.media.inputs import MediaInputsSpec
from kvasir.core.media.audio import audio_header
from kvasir.core.media.images import image_header
from kvasir.core.media.prompts import MediaKind
from kvasir.core.media.videos import taken_frames, video_header


class MediaTooLarge(ValueError):
    """A file exceeds a limit of the spec."""


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """What a model makes of media, and the limits on them."""

    rules: MediaRules
    gateway: GatewaySpec

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds that requests may have."""
        return tuple(kind for kind in self.rules.placeholders if self.limits(kind).most > 0)

    def limits(self, kind: MediaKind) -> MediaInputsSpec:
        """Return the limits on a kind."""
        return limits_of(self.gateway, kind)

    def meaning(self, kind: MediaKind) -> str:
        """Return a text that is equal in deployments that make the same of a file of this kind."""
        rules = {
            MediaKind.IMAGE: self.rules.image,
            MediaKind.VIDEO: self.rules.video,
            MediaKind.AUDIO: self.rules.audio,
        }
        every = self.limits(kind).model_dump()
        limits = {name: limit for name, limit in every.items() if not name.startswith("url_")}
        return f"{rules[kind]!r} {limits!r}"

    def measured(self, kind: MediaKind, data: bytes) -> tuple[int, int]:
        """Return how many tokens a file becomes, and what is taken of it (see PromptMedia). Raises
        MediaTooLarge for one that exceeds a limit, and ValueError, with the reason, for one of another
        format, with a damaged header, or that the model does not take."""
        most = self.limits(kind).max_bytes
        if len(data) > most:
            raise MediaTooLarge(f"it has more than the {most} bytes that are allowed")
        match kind:
            case MediaKind.IMAGE:
                return self._image(data), 0
            case MediaKind.VIDEO:
                return self._video(data)
            case MediaKind.AUDIO:
                return self._audio(data)

    def _image(self, data: bytes) -> int:
        rule = self.rules.image
        if rule is None:
            raise ValueError("the model takes no images")
        header = image_header(data)
        _check_pixels(header.width, header.height, self.gateway.image_inputs.max_pixels)
        return rule.tokens(header.width, header.height)

    def _video(self, data: bytes) -> tuple[int, int]:
        rule, limits = self.rules.video, self.gateway.video_inputs
        if rule is None:
            raise ValueError("the model takes no videos")
        header = video_header(data)
        _check_pixels(header.width, header.height, limits.max_pixels)
        _check_seconds(header.seconds, limits.max_seconds)
        frames = taken_frames(header.frames, limits.frames)
        return rule.tokens(header.width, header.height, frames), frames

    def _audio(self, data: bytes) -> tuple[int, int]:
        rule = self.rules.audio
        if rule is None:
            raise ValueError("the model takes no audio")
        header = audio_header(data)
        _check_seconds(header.seconds, self.gateway.audio_inputs.max_seconds)
        samples = header.resampled(rule.rate)
        return rule.tokens(samples), samples


def limits_of(gateway: GatewaySpec, kind: MediaKind) -> MediaInputsSpec:
    """Return the limits of the spec on a kind."""
    match kind:
        case MediaKind.IMAGE:
            return gateway.image_inputs
        case MediaKind.VIDEO:
            return gateway.video_inputs
        case MediaKind.AUDIO:
            return gateway.audio_inputs


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise MediaTooLarge(f"it has {width} x {height} pixels; {most} are allowed")


def _check_seconds(seconds: float, most: float) -> None:
    if seconds > most:
        raise MediaTooLarge(f"it has {seconds:.1f} s; {most:g} s are allowed")
