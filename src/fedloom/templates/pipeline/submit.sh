# Run the pipeline on a cluster: sh submit.sh URL STORE
set -eu
fedloom pipeline --kubeflow "$1" submit personalized_federation experiment.yaml --set storage="$2" \
  --cluster cluster.yaml --pods pods.yaml --wait
