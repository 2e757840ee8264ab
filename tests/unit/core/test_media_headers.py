"""What headers of audio and video files say, and that no header can claim more than a bound."""

from __future__ import annotations

import contextlib
import io
import random
import struct
from array import array

import numpy as np
import pytest
from tests.kit.media.media_files import mp4, wav

from kvasir.core.media.audio import AudioHeader, audio_header
from kvasir.core.media.prompts import MediaKind, PromptMedia, collapsed, expanded, kinds_of, media_key
from kvasir.core.media.videos import VideoHeader, video_header


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1)])
def test_a_wav_file_has_the_samples_that_it_says(rate: int, channels: int) -> None:
    header = audio_header(wav(0.25, rate=rate, channels=channels))
    assert header == AudioHeader("WAV", rate, rate // 4)
    assert header.seconds == 0.25
    assert header.resampled(16_000) == 4000


def test_a_wav_file_whose_writer_did_not_know_its_size_has_the_samples_that_are_there() -> None:
    data = wav(0.25)
    at = data.index(b"data") + 4
    for size in (0, 0xFFFFFFFF):
        assert audio_header(data[:at] + struct.pack("<I", size) + data[at + 4 :]).samples == 4000


@pytest.mark.parametrize(
    ("form", "rate"), [("FLAC", 44_100), ("MP3", 44_100), ("MP3", 22_050), ("MP3", 48_000)]
)
def test_other_formats_have_the_samples_that_their_decoder_finds(form: str, rate: int) -> None:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    sound = np.sin(np.arange(rate) / 20).astype("float32")
    soundfile.write(file, sound, rate, format=form)
    data = file.getvalue()
    tagged = b"ID3\x04\x00\x00" + bytes((0, 0, 1, 0)) + bytes(128) + data if form == "MP3" else data
    for each in (data, tagged):
        header = audio_header(each)
        assert header[:2] == (form, rate)
        decoded = len(soundfile.read(io.BytesIO(each))[0])
        # Encoders of MP3 fill whole frames.
        assert abs(header.samples - decoded) <= (3 * 1152 if form == "MP3" else 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of WAV, MP3, FLAC"),
        (b"OggS" + bytes(40), "none of WAV, MP3, FLAC"),
        (b"RIFF" + bytes(4) + b"WAVE", "WAV header is damaged"),
        (wav(0.1)[:30], "WAV header is damaged"),
        (wav(0.1).replace(b"fmt \x10\0\0\0\1", b"fmt \x10\0\0\0\x55"), "WAV code 85"),
        (b"fLaC\0\0\0\x22" + bytes(34), "FLAC header is damaged"),
        (b"ID3\x04\0\0\xff\xff\xff\xff", "MP3 header is damaged"),
        (b"\xff\xfb\x00\x00" * 9, "MP3 header is damaged"),
    ],
)
def test_what_is_no_audio_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        audio_header(data)


def test_frames_of_an_mp3_file_are_bounded() -> None:
    shortest = b"\xff\xe3\x18\xc4" + bytes(68)
    assert audio_header(shortest * 20).format == "MP3"
    with pytest.raises(ValueError, match="more than 150000 frames"):
        audio_header(shortest * 150_001)


@pytest.mark.parametrize("turned", [False, True])
def test_an_mp4_file_has_its_dimensions_as_it_is_shown(turned: bool) -> None:
    header = video_header(mp4(640, 360, 100, turned=turned))
    assert header == VideoHeader(*((360, 640) if turned else (640, 360)), 100, 4.0)


def test_an_mp4_file_of_an_encoder_says_what_its_decoder_finds() -> None:
    cv2 = pytest.importorskip("cv2")
    from tests.kit.media.films import HEIGHT, WIDTH, mp4_film

    assert cv2 is not None
    assert video_header(mp4_film(1, frames=48)) == VideoHeader(WIDTH, HEIGHT, 48, 2.0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is not MP4"),
        (b"\x1aE\xdf\xa3" + bytes(60), "it is not MP4"),
        (mp4(64, 64, 0), "does not say how many frames"),
        (mp4(64, 64, 5)[:200], "no video track, or is damaged"),
        (mp4(64, 64, 5).replace(b"vide", b"text"), "no video track"),
        (mp4(0, 64, 5), "no video track, or is damaged"),
        (mp4(64, 64, 1_000_000, rate=1_000_000), "more than 240 frames a second"),
    ],
)
def test_what_is_no_video_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        video_header(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_end_in_an_answer_or_a_reason(seed: int) -> None:
    rng = random.Random(seed)
    for read, whole in ((audio_header, wav(0.05)), (video_header, mp4(64, 64, 50))):
        for _ in range(200):
            data = bytearray(whole[:400])
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(ValueError):
                assert read(bytes(data)).seconds >= 0


def test_media_of_several_kinds_are_placed_in_the_order_of_the_prompt_and_back() -> None:
    places = {MediaKind.IMAGE: 97, MediaKind.VIDEO: 98, MediaKind.AUDIO: 99}

    tokens = array("I", [1, 99, 2, 97, 3, 98, 97, 4])
    sent = [
        PromptMedia(0, 2, bytes([2]), b"", MediaKind.IMAGE),
        PromptMedia(0, 1, bytes([1]), b"", MediaKind.IMAGE),
        PromptMedia(0, 3, bytes([3]), b"", MediaKind.VIDEO),
        PromptMedia(0, 2, bytes([2]), b"", MediaKind.AUDIO),
    ]
    made, placed = expanded(tokens, places, sent)
    assert made.tolist() == [1, 99, 99, 2, 97, 97, 3, 98, 98, 98, 97, 4]
    assert [(each.kind, each.offset) for each in placed] == [
        (MediaKind.AUDIO, 1),
        (MediaKind.IMAGE, 4),
        (MediaKind.VIDEO, 7),
        (MediaKind.IMAGE, 10),
    ]
    assert collapsed(made, places, placed) == tokens
    assert kinds_of(placed) == set(MediaKind)
    with pytest.raises(ValueError, match="the model takes no videos"):
        collapsed(made, {MediaKind.IMAGE: 97, MediaKind.AUDIO: 99}, placed)


def test_a_key_names_the_kind_and_what_is_taken() -> None:
    items = [
        PromptMedia(0, 1, b"d", b"", kind, extent)
        for kind in MediaKind
        for extent in (0, 16)
        if kind or extent
    ]
    keys = {item.key("s") for item in items}
    assert len(keys) == 1 + 2 + 2
    assert {media_key(f"adapter:{key}") for key in keys} == keys
