#!/bin/sh
# Writes images/constraints.txt: the versions that the tests run with (.venv), with the hashes of their files.
# torch is left out: which build of it an image gets, and so its hash, is a matter of TORCH_INDEX.
set -eu
cd "$(dirname "$0")/.."
bin=.venv/bin

{
  echo "# Made by images/lock.sh."
  "$bin/uv" pip freeze --python "$bin/python" --exclude-editable |
    { echo hatchling | "$bin/uv" pip compile --quiet pyproject.toml - --extra kubeflow --extra metrics --extra tracing --constraints /dev/fd/3 \
      --python-version 3.11 --python-platform linux --generate-hashes --no-emit-package torch \
      --no-annotate --no-header; } 3<&0
} >images/constraints.txt.new
mv images/constraints.txt.new images/constraints.txt
