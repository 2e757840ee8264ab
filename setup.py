"""Builds the native extension; everything else is declared in pyproject.toml.

The extension is optional at build time: without a C++ compiler the Python twin serves, says so once
on start, and benchmarks refuse to run on it.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

SOURCES = "platform/kvasir/native/src"

with ParallelCompile():
    setup(
        ext_modules=[
            Pybind11Extension(
                "kvasir.native._native",
                sorted(glob(f"{SOURCES}/**/*.cpp", recursive=True)),
                include_dirs=[SOURCES],
                depends=sorted(glob(f"{SOURCES}/**/*.hpp", recursive=True)),
                cxx_std=17,
                extra_compile_args=["-O3", "-fvisibility=hidden"],
                optional=True,
            )
        ]
    )
