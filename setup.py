"""Builds the native code; everything else is declared in pyproject.toml.

All parts are optional at build time. Without a C++ compiler the Python twin of the extension serves, says so
once on start, and benchmarks refuse to run on it; engines over several nodes do not start. Modules that
cannot be compiled run as Python, and benchmarks refuse likewise.
"""

from __future__ import annotations

from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = "platform/kvasir/native/src"
SIGNING = "workers/kvasir_workers/engines/signing"

COMPILED = "platform/kvasir/compiled.txt"
"""The modules, as patterns, that mypyc compiles: what a router executes for every request, except coroutines.
Compiled ones share the exception that is being handled, and one raises that of another."""
INTERPRETED = ("__init__.py", "packing.py")
"""What remains Python of them. msgspec decodes the classes of the latter by their annotations, which compiled
classes do not keep."""
ROUNDED = "-ffp-contract=off"
"""A contracted operation rounds once, and would decide otherwise than Python does."""
GROUP = "kvasir.compiled"
GENERATED = "build/compiled"


def compiled() -> list[Extension]:
    """Return the extensions of all compiled modules, with one library. Raises SystemExit with the reason if
    they cannot be translated, and ImportError without mypyc."""
    from mypyc.build import mypycify

    found = [each for pattern in Path(COMPILED).read_text().split() for each in Path().glob(pattern)]
    sources = sorted(str(each) for each in found if each.name not in INTERPRETED)
    extensions = mypycify(
        ["--follow-imports=silent", *sources],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        target_dir=GENERATED,
        group_name=GROUP,
    )
    for each in extensions:
        # Where mypyc writes the headers of a group whose name has a dot.
        each.include_dirs.append(f"{GENERATED}/{GROUP.rpartition('.')[0]}")
        # A compiler that warns of more than ours does not make the code wrong.
        flags = [flag for flag in each.extra_compile_args if flag != "-Werror"]
        each.extra_compile_args = [*flags, ROUNDED]
    return extensions


def in_place() -> list[Path]:
    """Return the compiled modules beside their sources, and their library."""
    found = [*Path("platform").rglob("*.so"), *Path("router").rglob("*.so")]
    library = GROUP.rpartition(".")[2] + "__"
    return [
        each
        for each in found
        if each.name.startswith(library) or each.with_name(each.name.partition(".")[0] + ".py").exists()
    ]


class BuildExtensions(build_ext):
    """Builds the extensions, and then the compiled modules: all of them or none."""

    def run(self) -> None:
        for old in in_place() if self.inplace else ():
            old.unlink()
        super().run()
        # Apart from the others, so that a failure leaves no part of it.
        apart = build_ext(self.distribution)
        for option in ("inplace", "editable_mode", "build_lib", "build_temp", "force"):
            setattr(apart, option, getattr(self, option))
        native = self.distribution.ext_modules
        try:
            self.distribution.ext_modules = compiled()
            apart.ensure_finalized()
            apart.run()
        except (ImportError, SystemExit, BaseError, CCompilerError) as error:
            self.warn(f"the router runs as Python, which takes longer: {error}")
        else:
            self.extensions = [*self.extensions, *apart.extensions]
            # Of what did not have to be compiled again, the copy would be older than its source.
            for made in in_place() if self.inplace else ():
                made.touch()
        self.distribution.ext_modules = native


with ParallelCompile():
    setup(
        cmdclass={"build_ext": BuildExtensions},
        ext_modules=[
            Pybind11Extension(
                "kvasir.native._native",
                sorted(glob(f"{SOURCES}/**/*.cpp", recursive=True)),
                include_dirs=[SOURCES],
                depends=sorted(glob(f"{SOURCES}/**/*.hpp", recursive=True)),
                cxx_std=17,
                extra_compile_args=["-O3", "-fvisibility=hidden", ROUNDED],
                optional=True,
            ),
            Pybind11Extension(
                "kvasir.core.figures._figures",
                ["platform/kvasir/core/figures/figures.cpp"],
                depends=["platform/kvasir/core/figures/packing.hpp"],
                cxx_std=17,
                extra_compile_args=["-O3", "-fvisibility=hidden"],
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
        ],
    )
