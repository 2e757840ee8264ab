"""Speculation pays where steps are limited by memory, and its draft costs less than it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit import public_models as models

from kvasir.hardware.gpus import gpu_named
from kvasir.performance.device import device_of
from kvasir.performance.speculation import Speculation, best_lookahead, speculation_gain
from kvasir.performance.step import EngineModel, accepted_tokens
from kvasir.performance.work import model_work
from kvasir.sizing.shape import EngineShape

_GPU = gpu_named("H100")
assert _GPU is not None
_TARGET = EngineModel(model_work(models.config_of(models.LLAMA_70B)), device_of(_GPU), EngineShape(tensor=4))
_DRAFT = replace(_TARGET, work=model_work(models.config_of(models.LLAMA_8B)))


def test_expected_tokens_of_a_round_are_those_of_leviathan_et_al() -> None:
    assert accepted_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert accepted_tokens(0.8, 4) == pytest.approx(3.3616)
    assert accepted_tokens(1.0, 4) == 5.0
    assert accepted_tokens(0.0, 4) == 1.0


def test_proposals_without_a_model_pay_for_one_stream() -> None:
    gain = speculation_gain(_TARGET, Speculation(0.8, 5), 1, 1000)
    assert gain.pays
    assert gain.speed_up == pytest.approx(3.69, rel=0.1)


def test_a_draft_model_takes_a_part_of_the_gain() -> None:
    free = speculation_gain(_TARGET, Speculation(0.8, 5), 1, 1000)
    drafted = speculation_gain(_TARGET, Speculation(0.8, 5, _DRAFT), 1, 1000)
    assert 1.0 < drafted.speed_up < free.speed_up


def test_proposals_that_are_rarely_accepted_do_not_pay_in_large_batches() -> None:
    assert not speculation_gain(_TARGET, Speculation(0.3, 5, _DRAFT), 256, 1000).pays
    assert best_lookahead(_TARGET, Speculation(0.1, 1, _DRAFT), 256, 1000) == 0


def test_the_best_lookahead_grows_with_the_acceptance() -> None:
    rare, often = (best_lookahead(_TARGET, Speculation(each, 1, _DRAFT), 4, 1000) for each in (0.5, 0.9))
    assert 0 < rare < often
