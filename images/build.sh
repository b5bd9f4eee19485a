#!/bin/sh
# Build images with docker buildx or, if it is not available, with buildah (make images):
#   images/build.sh [TARGET...]    worker, aggregator, components, worker-cuda; default: the first three
# docs/chart.md describes REGISTRY, VERSION, REVISION, BASE, TORCH_INDEX and TORCH_VERSION. PUSH=1 pushes the images.
set -eu
cd "$(dirname "$0")/.."

VERSION=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
REVISION=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export REGISTRY="${REGISTRY:-}" VERSION REVISION
[ $# -gt 0 ] || set -- worker aggregator components

if docker buildx version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
  for target in "$@"; do
    for name in BASE TORCH_INDEX TORCH_VERSION; do
      eval "value=\${$name-unset}"
      [ "$value" = unset ] || set -- "$@" --set "$target.args.$name=$value"
    done
  done
  [ "${PUSH:-}" ] && set -- "$@" --push
  exec docker buildx bake "$@"
fi
command -v buildah >/dev/null || {
  echo "make images: docker buildx with a running daemon, or buildah, is required, and neither was found." >&2
  echo "  Debian: apt-get install buildah" >&2
  exit 1
}
# Needs no privileges of a container engine, so it also works inside a container.
export BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}"
digest() { find "$@" -type f ! -name '*.pyc' -exec sha256sum {} + | LC_ALL=C sort | sha256sum | cut -c1-16; }
tools=$(digest pyproject.toml images/constraints.txt images/uv.txt images/install.sh images/slim.py)
source=$(digest pyproject.toml README.md LICENSE src components pipelines)
for target in "$@"; do
  stage=$target
  image="${REGISTRY:-localhost/}fedloom/$target:$VERSION"
  set -- --build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" --build-arg "TOOLS=$tools" --build-arg "SOURCE=$source"
  if [ "$target" = worker-cuda ]; then
    stage=worker
    set -- "$@" --build-arg TORCH_INDEX=
  elif [ "${TORCH_INDEX-unset}" != unset ]; then
    set -- "$@" --build-arg "TORCH_INDEX=$TORCH_INDEX"
  fi
  [ "${BASE:-}" ] && set -- "$@" --build-arg "BASE=$BASE"
  [ "${TORCH_VERSION:-}" ] && set -- "$@" --build-arg "TORCH_VERSION=$TORCH_VERSION"
  echo "images: building $image with buildah"
  # shellcheck disable=SC2086
  buildah build ${BUILDAH_OPTIONS:-} --layers --file images/Dockerfile --target "$stage" --tag "$image" "$@" .
  if [ "${PUSH:-}" ]; then buildah push "$image"; fi
done
