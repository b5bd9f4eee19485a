#!/bin/sh
# Alone, WGA, WGA with cosine weights and Bias Correction with LeNet on Fashion-MNIST: docs/results/wga.md. Every rule gets
# the same grid of step sizes and two seeds; validation chooses. Interrupted, it goes on where it was.
# FEDLOOM_RUNS: where the runs lie (default runs/wga-lenet).
set -eu
cd "$(dirname "$0")/.."
fedloom=.venv/bin/fedloom
runs=${FEDLOOM_RUNS:-runs/wga-lenet}
sweep() { # folder, options...; runs that leave the finite range are results, too (exit code 5)
    out="$runs/$1"
    shift
    $fedloom run experiments/wga-lenet.yaml --out "$out" --resume --seeds 1-2 --grid algorithm.lr=0.03,0.1,0.3 "$@" ||
        [ $? -eq 5 ]
}
$fedloom data fetch fashion-mnist
sweep alone --set algorithm.rule=alone
sweep wga --set algorithm.rule=wga
sweep bc
sweep cosine --set algorithm.rule=wga --set algorithm.weights=cosine
$fedloom compare "$runs/alone" "$runs/wga" "$runs/bc" "$runs/cosine" --out "$runs/comparison"
