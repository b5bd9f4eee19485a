#!/bin/sh
# Installs into an image's /opt/venv while it is built, in the versions of constraints.txt and no others:
#   install.sh needs EXTRA...              what FedLoom needs with these extras, without FedLoom
#   install.sh only [OPTION...] PACKAGE...  these packages, without what they need
#   install.sh wheel DIR                   nothing: makes FedLoom's wheel from the current folder
#   install.sh slim MODULE...              nothing: takes out what is not read, and compiles these modules (slim.py)
set -eu

tools=$(dirname "$0")
export UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/venv
# Certificates of the base image, so that one with a company's own works.
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
