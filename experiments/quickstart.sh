#!/bin/sh
# What `make run` does: the quickstart for PeFLL, FedAvg and Local, then one table of what each client would get.
# Interrupted, it goes on where it was. Settings and how they were chosen: docs/results/quickstart.md
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/quickstart}
local="steps: 20, batch_size: 16, clip: 50.0"

run() {
    out="$runs/$1"
    shift
    .venv/bin/fedloom run experiments/quickstart.yaml --out "$out" --resume "$@"
}

run pefll
run fedavg --set "algorithm={name: fedavg, local: {$local, lr: 0.03}, personalize_steps: 20}"
run local --set "algorithm={name: local, local: {steps: 100, batch_size: 16, clip: 50.0, lr: 0.03}}" \
    --set federation.rounds=0
.venv/bin/fedloom compare "$runs/pefll" "$runs/fedavg" "$runs/local"
