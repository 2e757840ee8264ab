"""Builds the native code; everything else is declared in pyproject.toml.

Both parts are optional at build time. Without a C++ compiler the Python twin of the extension serves, says so
once on start, and benchmarks refuse to run on it; engines over several nodes do not start.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup

SOURCES = "platform/kvasir/native/src"
SIGNING = "workers/kvasir_workers/engines/signing"

with ParallelCompile():
    setup(
        ext_modules=[
            Pybind11Extension(
                "kvasir.native._native",
                sorted(glob(f"{SOURCES}/**/*.cpp", recursive=True)),
                include_dirs=[SOURCES],
                depends=sorted(glob(f"{SOURCES}/**/*.hpp", recursive=True)),
                cxx_std=17,
                # A contracted operation rounds once, and would decide otherwise than the Python twin.
                extra_compile_args=["-O3", "-fvisibility=hidden", "-ffp-contract=off"],
                optional=True,
            ),
            # Not a module of Python: LD_PRELOAD loads it into the processes of engines over several nodes.
            Extension(
                "kvasir_workers.engines.signing._signed_tcp",
                [f"{SIGNING}/signed_tcp.c"],
                extra_compile_args=["-fvisibility=hidden"],
                libraries=["dl"],
                optional=True,
            ),
        ]
    )
