#!/bin/sh
# Install packages into /opt/venv during an image build, only in the versions of constraints.txt:
#   install.sh needs EXTRA...              install FedLoom's dependencies with these extras, without FedLoom
#   install.sh only [OPTION...] PACKAGE...  install these packages without their dependencies
#   install.sh wheel DIR                   build FedLoom's wheel from the current folder
#   install.sh slim MODULE...              remove unused files and compile these modules (slim.py)
set -eu

tools=$(dirname "$0")
export UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/venv
# Use the base image's CA certificates, so that a base image with a company's CA works.
export UV_SYSTEM_CERTS=1

command=$1
shift
if [ "$command" = wheel ]; then
  exec "$tools/uv/bin/uv" build --wheel --out-dir "$1" --build-constraints "$tools/constraints.txt"
fi
if [ "$command" = slim ]; then
  exec "$VIRTUAL_ENV/bin/python" "$tools/slim.py" "$@"
fi
[ -d "$VIRTUAL_ENV" ] || "$tools/uv/bin/uv" venv --quiet "$VIRTUAL_ENV"
case "$command" in
  needs)
    for extra in "$@"; do
      set -- "$@" --extra "$extra"
      shift
    done
    set -- --requirements "$tools/pyproject.toml" "$@"
    ;;
  only) set -- --no-deps "$@" ;;
esac
exec "$tools/uv/bin/uv" pip install --constraints "$tools/constraints.txt" "$@"
