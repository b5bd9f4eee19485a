# Write personalized_federation.yaml, for an upload to Kubeflow Pipelines.
set -eu
fedloom pipeline compile personalized_federation --pods pods.yaml
