#!/bin/sh
# Start a local Kubernetes cluster in containers and run the end-to-end tests on it (docs/e2e.md): kind.sh up|test|down
set -eu
cd "$(dirname "$0")/../.."

NAME=${KIND_NAME:-fedloom}
NAMESPACE=fedloom-e2e
IMAGE=${KIND_IMAGE:-fedloom/components:e2e}
ACCESS_KEY=fedloom
SECRET_KEY=only-on-this-machine
PYTHON=${PYTHON:-.venv/bin/python}
export KUBECONFIG="$PWD/.kind/kubeconfig"

need() {
  for tool in "$@"; do
    command -v "$tool" >/dev/null || {
      echo "kind.sh: $tool is not installed; needed: docker (with buildx), kind 0.33 or newer, kubectl" >&2
      exit 1
    }
  done
}

up() {
  need docker kind kubectl
  docker info >/dev/null 2>&1 || { echo "kind.sh: docker does not answer: start it, and see: docker info" >&2; exit 1; }
  mkdir -p .kind
  if kind get clusters 2>/dev/null | grep -qx "$NAME"; then
    kind export kubeconfig --name "$NAME" --kubeconfig "$KUBECONFIG"
  else
    kind create cluster --name "$NAME" --config images/kind/cluster.yaml --kubeconfig "$KUBECONFIG" --wait 180s
  fi
  docker buildx bake --load --set "components.tags=$IMAGE" components
  kind load docker-image "$IMAGE" --name "$NAME"
  apply kubectl create namespace "$NAMESPACE"
  # Enforce the strictest pod security standard on every pod.
  kubectl label --overwrite namespace "$NAMESPACE" pod-security.kubernetes.io/enforce=restricted
  kubectl config set-context --current --namespace "$NAMESPACE"
  apply kubectl create secret generic fedloom-storage \
    --from-literal="AWS_ACCESS_KEY_ID=$ACCESS_KEY" --from-literal="AWS_SECRET_ACCESS_KEY=$SECRET_KEY"
  apply kubectl create serviceaccount fedloom-launcher
  kubectl apply -f components/federate/rbac.yaml
  apply kubectl create rolebinding fedloom-e2e --role fedloom-launcher --serviceaccount "$NAMESPACE:fedloom-launcher"
  kubectl apply -f images/kind/seaweedfs.yaml
  kubectl rollout status deployment/seaweedfs --timeout 300s
}

apply() {
  "$@" --dry-run=client -o yaml | kubectl apply -f -
}

run_tests() {
  [ -f "$KUBECONFIG" ] || { echo "kind.sh: no cluster here; make one with: make kind-up" >&2; exit 1; }
  [ -x "$PYTHON" ] || { echo "kind.sh: $PYTHON is not there; make it with: make setup" >&2; exit 1; }
  export FEDLOOM_E2E_KUBECONFIG="$KUBECONFIG" FEDLOOM_E2E_IMAGE="$IMAGE" FEDLOOM_E2E_NAMESPACE="$NAMESPACE"
  export FEDLOOM_E2E_STORAGE=s3://fedloom/e2e FEDLOOM_E2E_S3_ENDPOINT=http://127.0.0.1:30833
  export FEDLOOM_E2E_POD_S3_ENDPOINT="http://seaweedfs.$NAMESPACE.svc:8333"
  export AWS_ACCESS_KEY_ID="$ACCESS_KEY" AWS_SECRET_ACCESS_KEY="$SECRET_KEY" AWS_REGION=us-east-1
  exec "$PYTHON" -m pytest tests/e2e "$@"
}

command=${1:-}
[ $# -eq 0 ] || shift
case "$command" in
  up) up ;;
  test) run_tests "$@" ;;
  down)
    need kind
    kind delete cluster --name "$NAME"
    rm -rf .kind
    ;;
  *)
    echo "kind.sh: found '$command'; allowed: up, test, down" >&2
    exit 2
    ;;
esac
