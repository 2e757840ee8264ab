"""The options of `kvasir check`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse


def add_check_options(check: argparse.ArgumentParser) -> None:
    """Add them."""
    check.add_argument(
        "--fit",
        action="store_true",
        help="check only whether models can be served and fit on the GPUs of their pools, wherever those are",
    )
    check.add_argument(
        "--gpu",
        dest="gpus",
        action="append",
        default=[],
        type=_pool_and_gpu,
        metavar="POOL=GPU",
        help="with --fit: the GPU of a pool whose spec names none, as its driver or the node label "
        "nvidia.com/gpu.product does (repeatable; the smallest counts)",
    )


def _pool_and_gpu(text: str) -> tuple[str, str]:
    pool, equals, gpu = text.partition("=")
    if not (pool and equals and gpu.strip()):
        raise argparse.ArgumentTypeError(f"{text!r}: POOL=GPU, as in decode=NVIDIA-H100-80GB-HBM3")
    return pool, gpu.strip()
