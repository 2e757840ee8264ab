"""Which layers of a model the pipeline stages of two engines have in common. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.sizing.shape import stages
from kvasir_workers.transfer.common.sliced import LayerSlice


def slice_starts(layers: int, sizes: Sequence[int]) -> list[int]:
    """Return the first layer of each slice of a model with `layers` layers: slices end wherever a stage of an
    engine with one of these `sizes` ends."""
    return sorted({stage.start for size in sizes for stage in stages(layers, size)})


def slices_of(held: Sequence[int], layers: int, sizes: Sequence[int]) -> list[LayerSlice]:
    """Return the slices that a rank has. `held` are the layers of its regions, in their order."""
    starts = slice_starts(layers, sizes)
    ends = [*starts[1:], layers]
    found = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        within = [at for at, layer in enumerate(held) if start <= layer < end]
        if within:
            found.append(LayerSlice(number, range(within[0], within[-1] + 1)))
    return found


def sending_stages(layers: int, stage: int, mine: int, theirs: int) -> list[int]:
    """Return the stages of an engine with `theirs` stages that have layers of `stage` of `mine`."""
    if mine == theirs:
        return [stage]
    wanted = stages(layers, mine)[stage]
    return [
        number
        for number, held in enumerate(stages(layers, theirs))
        if held.start < wanted.stop and wanted.start < held.stop
    ]
