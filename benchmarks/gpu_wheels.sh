#!/usr/bin/env bash
# Downloads, into .whl, the packages that the library imports beside torch and numpy, for a machine with
# an NVIDIA GPU and no network: gpu_wheels.sh [VERSION OF PYTHON THERE, 3.12]. x86-64, about 6 MiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
done
rm -rf .whl
python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version "${1:-3.12}" \
    --implementation cp "${platforms[@]}" -c constraints.txt -d .whl pydantic xxhash safetensors rich packaging
du -sh .whl
