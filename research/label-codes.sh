#!/bin/sh
# Runs of the quickstart with five classes and thirty images a client: with the same labels for all clients, and with
# four groups of clients that number the classes differently. Step sizes are the quickstart's, without a search for this
# setting. Results: docs/results/quickstart.md. An interrupted script resumes.
#
#   research/label-codes.sh                 both parts
#   research/label-codes.sh five-classes    one part: five-classes | label-codes
#
# FEDLOOM_RUNS: folder of the runs (default runs/quickstart).
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/quickstart}
five="scheme: classes, clients: 200, classes_per_client: 5, train_per_client: 30, test_per_client: 50"
local="batch_size: 10, clip: 50.0"

run() { # method, options...
    out="$runs/$part/$1"
    shift
    .venv/bin/fedloom run experiments/quickstart.yaml --out "$out" --resume --no-report --seeds 2-4 --set "$partition" \
        --set "evaluation.own_steps=[0, 1, 5, 20, 50]" --set evaluation.every=60 "$@"
}

for part in ${1:-five-classes label-codes}; do
    case $part in
        five-classes) partition="data.partition={$five}" ;;
        label-codes) partition="data.partition={$five, shift: {kind: labels, groups: 4}}" ;;
        *)
            echo "part must be one of five-classes, label-codes (got $part)" >&2
            exit 2
            ;;
    esac
    run pefll --set federation.rounds=240
    run fedavg --set federation.rounds=60 --set "algorithm={name: fedavg, local: {$local, steps: 20, lr: 0.03}}"
    run local --set federation.rounds=0 --set "algorithm={name: local, local: {$local, steps: 100, lr: 0.01}}"
done
