# Run a member's worker: sh member.sh NAME [OPTION...]. Its table is in NAME/patients.csv, and never leaves the machine.
set -eu
name=$1
shift
if [ ! -d "$name/packed" ]; then
    fedloom data pack "$name/patients.csv" --out "$name/packed" --id "$name" --experiment federation.yaml
fi
exec fedloom worker --aggregator "${AGGREGATOR:-localhost:7733}" --data "$name/packed" --name "$name" \
    --out "$name/models" --credentials "certificates/$name" --policy policy.yaml "$@"
