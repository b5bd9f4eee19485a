#!/bin/sh
# Alone, WGA and Bias Correction on Fashion-MNIST, every client user 0 at once: docs/results/wga.md.
# Interrupted, it goes on where it was. FEDLOOM_RUNS: where the runs lie (default runs/wga-fashion-mnist).
set -eu
cd "$(dirname "$0")/.."
fedloom=.venv/bin/fedloom
runs=${FEDLOOM_RUNS:-runs/wga-fashion-mnist}
sweep() { # folder, options...
    out="$runs/$1"
    shift
    $fedloom run experiments/wga-fashion-mnist.yaml --out "$out" --resume --seeds 1-2 "$@"
}
alphas=algorithm.alpha=0.3,0.6,0.9
$fedloom data fetch fashion-mnist
sweep alone --set algorithm.rule=alone
sweep wga --grid "$alphas" --set algorithm.rule=wga
sweep cosine --grid "$alphas" --set algorithm.rule=wga --set algorithm.weights=cosine
sweep bc --grid "$alphas"
$fedloom compare "$runs/alone" "$runs/wga" "$runs/cosine" "$runs/bc" --out "$runs/comparison"
