"""The part of the deployment spec for media in requests: limits on images, videos and audio, and the origins
from which they are fetched."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.checks.outbound import OutboundRefused, check_target, parse_url
from kvasir.config.spec.base import Spec


class MediaInputsSpec(Spec):
    """What the specs of images, videos and audio have in common."""

    max_bytes: int = Field(default=4 << 20, ge=1024, le=64 << 20)
    """Maximum bytes of a file. A request is also bounded by `max_body_bytes`, in which a data URL takes four
    bytes for three of the file."""
    url_origins: tuple[str, ...] = Field(default=(), max_length=256)
    """Origins from which files are fetched, each `https://host` or `https://host:port`. Default: none, and
    files are sent as data URLs. Redirects are not followed."""
    url_private_address: bool = False
    """Allow origins with private addresses, such as a service in the same cluster, and http. Link-local
    addresses and metadata services are always refused."""
    url_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Timeout of one file that is fetched."""

    @property
    def most(self) -> int:
        """Maximum items of a request."""
        raise NotImplementedError

    @field_validator("url_origins")
    @classmethod
    def _as_browsers_spell_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            try:
                target = parse_url(origin)
            except OutboundRefused as error:
                raise ValueError(f"{origin!r} is no origin: {error}") from error
            if origin != f"{target.scheme}://{target.authority}":
                raise ValueError(
                    f"{origin!r} is no origin; write scheme://host or scheme://host:port in lower case, "
                    "without a path and the scheme's own port, as in https://images.example.com"
                )
        return value

    @model_validator(mode="after")
    def _public_unless_said(self) -> Self:
        for origin in self.url_origins:
            target = parse_url(origin)
            try:
                check_target(target, private=self.url_private_address)
            except OutboundRefused as error:
                raise ValueError(
                    f"url_origins: {error}; set url_private_address: true to allow it"
                ) from error
            if target.scheme != "https" and not self.url_private_address:
                raise ValueError(
                    f"url_origins: files are fetched over HTTPS; use https://{target.authority}, or set "
                    "url_private_address: true"
                )
        return self


class ImagesSpec(MediaInputsSpec):
    """Images in requests, of models that take images. Gateways and workers check the limits; a change of
    `max_images` or `max_pixels` restarts workers."""

    max_images: int = Field(default=8, ge=0, le=256)
    """Maximum images of a request. 0: images are refused."""
    max_pixels: int = Field(default=1 << 24, ge=1, le=1 << 28)
    """Maximum width times height of an image, which takes three bytes a pixel in a worker."""
    max_held_bytes: int = Field(default=256 << 20, ge=1024)
    """Maximum bytes of the images, videos and audio of all requests in flight, in each process that serves
    HTTP. Beyond it, requests with such files get 503."""

    @property
    def most(self) -> int:
        """See MediaInputsSpec."""
        return self.max_images


class VideosSpec(MediaInputsSpec):
    """Videos in requests, of models that take videos: MP4. Gateways and workers check the limits; a change
    restarts workers."""

    max_videos: int = Field(default=0, ge=0, le=16)
    """Maximum videos of a request. 0: videos are refused, and vLLM keeps no memory for encoding one."""
    max_pixels: int = Field(default=1920 * 1200, ge=1, le=1 << 26)
    """Maximum width times height of a frame."""
    max_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Maximum length of a video. Workers read all of its frames up to the last that is taken."""
    frames: int = Field(default=32, ge=1, le=768)
    """Maximum frames that are taken of a video, evenly spaced. Each takes three bytes a pixel in a worker."""

    @property
    def most(self) -> int:
        """See MediaInputsSpec."""
        return self.max_videos


class AudioSpec(MediaInputsSpec):
    """Audio in requests, of models that take audio: WAV, MP3 and FLAC. Gateways and workers check the limits;
    a change of `max_clips` restarts workers."""

    max_clips: int = Field(default=4, ge=0, le=64)
    """Maximum audio files of a request. 0: audio is refused."""
    max_seconds: float = Field(default=300.0, gt=0, le=3600)
    """Maximum length of an audio file. A model can take less."""

    @property
    def most(self) -> int:
        """See MediaInputsSpec."""
        return self.max_clips
