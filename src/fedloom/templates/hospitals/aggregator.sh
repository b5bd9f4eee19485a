# Run the aggregator. After a crash: sh aggregator.sh --resume
set -eu
exec fedloom aggregator federation.yaml --listen "${LISTEN:-0.0.0.0:7733}" --out run \
    --credentials certificates/aggregator "$@"
