#!/bin/sh
# Writes images/constraints.txt: one version, with the hashes of its files, of each package that FedLoom, its tests or its
# images need, the newest that pyproject.toml allows. `make setup` and the images install these versions.
# torch is left out: which build of it an image gets, and so its hash, is a matter of TORCH_INDEX.
set -eu
cd "$(dirname "$0")/.."

{
  echo "# Made by images/lock.sh."
  echo hatchling | .venv/bin/uv pip compile --quiet pyproject.toml - --extra dev --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
    --generate-hashes --no-emit-package torch --no-annotate --no-header
} >images/constraints.txt.new
mv images/constraints.txt.new images/constraints.txt
