"""Where compiled code is kept, who shares it, and what is removed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvasir.config.load.loader import load
from kvasir_workers.engines.vllm.caches import compiled
from kvasir_workers.engines.vllm.caches.compiled import cache_name, compile_cache, compiles, trim
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders
from kvasir_workers.engines.vllm.setup.arguments import environment

BUILD = ("vllm 0.32.0", "torch 2.13.0")
COMPILED = "pools.decode.engine.args={enforce_eager: false}"


def named(*options: str, build: tuple[str, ...] = BUILD, processor: str = "cpu") -> str:
    deployment = load(None, options)
    return cache_name(deployment, deployment.pool("decode"), build, processor)


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "installed_platform", lambda: "cpu")


@pytest.mark.parametrize(
    ("platform", "args", "expected"),
    [("cpu", "{}", False), ("cuda", "{}", True), ("cpu", "{enforce_eager: false}", True)],
)
def test_engines_compile_on_gpus_and_where_the_spec_says_so(platform: Any, args: str, expected: bool) -> None:
    pool = load(None, [f"pools.decode.engine.args={args}"]).pool("decode")
    assert compiles(pool, platform) is expected


def test_a_folder_says_for_what_it_is() -> None:
    assert named(COMPILED, "model.served_name=org/model").startswith("vllm-0.32.0-org-model-")
    assert named().startswith("vllm-0.32.0-eager-")


@pytest.mark.parametrize(
    "other",
    [
        "model.max_model_len=100",
        "model.revision=x",
        "pools.decode.engine.max_num_seqs=3",
        "pools.decode.engine.args={enforce_eager: false, optimization_level: 1}",
    ],
)
def test_another_model_or_configuration_has_another_folder(other: str) -> None:
    assert named(COMPILED, other) != named(COMPILED)


def test_other_builds_and_processors_have_other_folders() -> None:
    assert len({named(), named(build=("vllm 0.33.0",)), named(processor="another")}) == 3


@pytest.mark.parametrize("same", ["pools.decode.engine.seed=5", "pools.decode.engine.kv_cache_bytes=2000000"])
def test_settings_that_do_not_matter_to_a_compiler_keep_the_folder(same: str) -> None:
    assert named(COMPILED, same) == named(COMPILED)


def test_engines_that_do_not_compile_share_a_folder() -> None:
    assert named("pools.decode.engine.max_num_seqs=3") == named()


def kept(root: Path, *options: str) -> dict[str, str]:
    deployment = load(None, [COMPILED, *options])
    return compile_cache(deployment, deployment.pool("decode"), root)


def test_all_that_is_compiled_is_in_one_folder(tmp_path: Path) -> None:
    variables = kept(tmp_path / "default")
    folder = Path(variables["VLLM_CACHE_ROOT"])
    assert folder.is_dir()
    assert folder.parent == tmp_path / "default"
    assert all(Path(each).is_relative_to(folder) for each in variables.values())
    assert kept(tmp_path / "default") == variables


def test_the_spec_names_another_place(tmp_path: Path) -> None:
    variables = kept(tmp_path / "default", f"worker.compile_cache_dir={tmp_path / 'volume'}")
    assert Path(variables["VLLM_CACHE_ROOT"]).parent == tmp_path / "volume"
    assert not (tmp_path / "default").exists()


def test_a_place_that_cannot_be_written_only_costs_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    caplog.set_level(logging.WARNING)
    assert kept(tmp_path / "file" / "cache") == {}
    assert "compiled code is not kept in" in caplog.text


def test_beyond_the_limit_the_least_recent_that_nobody_uses_is_removed(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)
    for name, used_s in (("held", 0), ("older", 1), ("old", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code").write_bytes(b"x" * 100_000)
        (tmp_path / f"{name}.lock").touch()
        os.utime(tmp_path / f"{name}.lock", (used_s, used_s))
    folders.hold("held", lambda draft: None)
    os.utime(tmp_path / "held.lock", (0, 0))
    trim(folders, tmp_path, 250_000)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["held", "old"]


def test_a_compiler_is_switched_off_on_cpus_only_where_engines_do_not_compile() -> None:
    for option, platform, off in (("{}", "cpu", True), ("{enforce_eager: false}", "cpu", False)):
        deployment = load(None, [f"pools.decode.engine.args={option}"])
        made = environment(deployment, deployment.pool("decode"), cpus=2, platform=platform)
        assert ("TORCH_COMPILE_DISABLE" in made) is off
    deployment = load()
    on_gpus = environment(deployment, deployment.pool("decode"), cpus=2, platform="cuda")
    assert "TORCH_COMPILE_DISABLE" not in on_gpus
