#!/bin/sh
# Runs of Vowel with speakers as clients: a global model, the same model fine-tuned by each speaker, and a model of each
# speaker alone. About a minute. `research/vowel.sh grid` runs the search for the step sizes (docs/results/vowel.md).
set -eu
cd "$(dirname "$0")/.."
fedloom=.venv/bin/fedloom
runs=${FEDLOOM_RUNS:-runs/vowel}
local="algorithm={name: local, local: {epochs: 150, batch_size: 8, lr: 0.01}}"
$fedloom data fetch vowel
if [ "${1:-}" = grid ]; then
    grid="algorithm.local.lr=0.003,0.01,0.03,0.1,0.3"
    $fedloom run experiments/vowel.yaml --out "$runs/grid-fedavg" --resume --seeds 1-3 --grid "$grid" \
        --set evaluation.every=150
    $fedloom run experiments/vowel.yaml --out "$runs/grid-local" --resume --seeds 1-3 --grid "$grid" \
        --set "$local" --set federation.rounds=0
    exit
fi
$fedloom run experiments/vowel.yaml --out "$runs/fedavg" --resume --seeds 1-3
$fedloom run experiments/vowel.yaml --out "$runs/local" --resume --seeds 1-3 --set "$local" --set federation.rounds=0
$fedloom compare "$runs/fedavg" "$runs/local" --out "$runs/comparison"
