"""Requests with images and for LoRA adapters among three cells, in virtual time: which cells run them, and
what a client reads if none can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from hashlib import sha256

import pytest
from tests.kit.sim.cells import SimCell, SimCells
from tests.simulation.test_cell_losses import DELAYS, LONG, cell, served_by, without_workers

from kvasir.checkpoint.media.images import FixedTokens
from kvasir.checkpoint.media.rules import MediaRules
from kvasir.config.spec.deployment import Deployment, LoraLoadingSpec
from kvasir.config.spec.media.served import MediaInputs
from kvasir.config.spec.models import LoraSpec
from kvasir.core.errors import CapacityError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir.ports.router import StreamSink
from kvasir_platform.regions.needs import media as files
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

IMAGE = 7
SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
MODEL = cell().model.name


def spec(path: str = "/adapters/poet") -> Deployment:
    return cell().model_copy(
        update={
            "lora": (LoraSpec(name="poet", path=path),),
            "lora_loading": LoraLoadingSpec(allow=("/adapters",)),
        }
    )


def images(most_pixels: int = 1 << 20) -> MediaInputs:
    """What the model makes of images."""
    gateway = cell().gateway
    limits = gateway.image_inputs.model_copy(update={"max_pixels": most_pixels})
    return MediaInputs(
        MediaRules(image=FixedTokens(IMAGE, 4)), gateway.model_copy(update={"image_inputs": limits})
    )


def played(
    story: Callable[[SimCells], Awaitable[Iterable[ClientStream]]],
    differ: Callable[[SimCells], None] = lambda cells: None,
) -> None:
    """Play a story with three cells that have an adapter and take images, except where they `differ`. Check
    that its streams have what us answers a client of its own, and that each request ran in one cell at a
    time."""

    async def main() -> None:
        cells = SimCells(spec(), VirtualClock(), DELAYS)
        for each in cells.cells.values():
            each.media = {MODEL: images()}
        differ(cells)
        async with cells:
            for number, stream in enumerate(list(await story(cells))):
                cells.links.heal()
                own = send(cells["us"], f"own-{number}", stream.request)
                await asyncio.gather(stream.finished(), own.finished())
                assert (stream.tokens, stream.texts) == (own.tokens, own.texts)
            assert cells.twice == set()

    run_virtual(main())


def picture(data: bytes, offset: int = 2) -> PromptMedia:
    return PromptMedia(offset, 4, sha256(data).digest(), data)


def send(home: SimCell, name: str, request: Request) -> ClientStream:
    stream = ClientStream(replace(request, request_id=name))
    home.router.submit(stream.request, stream)
    return stream


def with_images(*data: bytes) -> Request:
    media = tuple(picture(each, 2 + 6 * at) for at, each in enumerate(data))
    prompt = [IMAGE if any(m.offset <= at < m.offset + 4 for m in media) else 100 + at for at in range(32)]
    return Request("", MODEL, token_ids(prompt), SHORT, media=media)


FOR_POET = Request("", MODEL, token_ids(range(32)), SHORT, adapter="poet")


def kept(site: SimCell, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Note the requests that a cell's own router gets."""
    got: list[Request] = []
    submit = site.cluster.router.submit

    def noted(request: Request, sink: StreamSink) -> None:
        got.append(request)
        submit(request, sink)

    monkeypatch.setattr(site.cluster.router, "submit", noted)
    return got


def test_a_request_with_images_is_served_by_another_cell_with_all_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home, got = cells["eu"], kept(cells["us"], monkeypatch)
        await without_workers(home)
        data = [
            bytes([at]) * size for at, size in enumerate((3, files.PIECE_BYTES, 5 * files.PIECE_BYTES + 1))
        ]
        stream = send(home, "seen", with_images(*data))
        await stream.finished()
        assert served_by(stream) == "us"
        assert [item.data for item in got[0].media] == data
        return [stream]

    played(story)


def test_a_request_for_an_adapter_is_served_by_the_nearest_cell_that_has_it() -> None:
    def differ(cells: SimCells) -> None:
        lora = spec("/adapters/another").lora
        cells["us"].deployment = cells["us"].deployment.model_copy(update={"lora": lora})

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        plain, adapted = send(home, "plain", replace(FOR_POET, adapter=None)), send(home, "poet", FOR_POET)
        await asyncio.gather(plain.finished(), adapted.finished())
        assert (served_by(plain), served_by(adapted)) == ("us", "ap")
        return [plain, adapted]

    played(story, differ)


def test_an_adapter_that_was_loaded_in_another_cell_is_known_and_served_there() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await cells["ap"].cluster.router.adapters.load(MODEL, "late", "/adapters/late", 0)
        await cells.clock.sleep(2.5)
        served = home.router.adapters.served()["late"]
        assert home.cluster.router.adapters.served() == {}
        stream = send(home, "late", replace(FOR_POET, adapter=served.key))
        await stream.finished()
        assert served_by(stream) == "ap"
        cells.links.cut("ap")
        await cells.clock.sleep(2.5)
        assert "late" not in home.router.adapters.served()
        return []

    played(story)


def test_cells_that_make_something_else_of_an_image_get_none() -> None:
    def differ(cells: SimCells) -> None:
        cells["us"].media = {MODEL: images(99)}
        cells["ap"].media = {}

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        stream = send(home, "seen", with_images(b"data"))
        await cells.clock.sleep(2.0)
        assert not stream.started.is_set()
        assert all(not cells[name].runs() for name in ("us", "ap"))
        home.router.cancel("seen")
        return []

    played(story, differ)


def test_a_refusal_at_home_says_why_no_other_cell_takes_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(cells: SimCells) -> None:
        cells["us"].media = {MODEL: images(99)}
        cells["ap"].media = {}

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]

        def full(request: Request, sink: object) -> None:
            raise CapacityError("The queue is full.", code="queue_full", retry_after_s=3.0)

        monkeypatch.setattr(home.cluster.router, "submit", full)
        with pytest.raises(CapacityError) as refused:
            send(home, "seen", with_images(b"data"))
        assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 3.0)
        assert refused.value.message == (
            "The queue is full. With images, no other cell takes it: "
            f"us: it does not serve {MODEL} with images; ap: it does not serve {MODEL} with images."
        )
        large = with_images(bytes(files.MAX_REQUEST_BYTES + 1))
        with pytest.raises(CapacityError, match="media of more than 32 MiB are not sent to other cells"):
            send(home, "large", large)
        return []

    played(story, differ)


def test_a_stream_with_an_image_goes_on_in_a_third_cell_when_its_cell_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home, got = cells["eu"], kept(cells["ap"], monkeypatch)
        await without_workers(home)
        stream = send(home, "seen", replace(with_images(b"data"), sampling=LONG))
        await stream.started.wait()
        cells.links.cut("us")
        await stream.finished()
        assert served_by(stream) == "ap"
        assert [item.data for item in got[0].media] == [b"data"]
        assert got[0].resumed is not None
        return [stream]

    played(story)
