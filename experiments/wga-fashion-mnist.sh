#!/bin/sh
# Alone, WGA and Bias Correction on Fashion-MNIST, every client user 0 at once: docs/results/wga.md.
#   sh experiments/wga-fashion-mnist.sh [OUT]
set -eu
out=${1:-runs/wga-fashion-mnist}
run() {
  name=$1
  shift
  fedloom run experiments/wga-fashion-mnist.yaml --set "name=$name" "$@" --out "$out/$name"
}
for seed in 1 2; do
  run "alone-$seed" --set "seed=$seed" --set algorithm.rule=alone
  for alpha in 0.3 0.6 0.9; do
    run "wga-$alpha-$seed" --set "seed=$seed" --set algorithm.rule=wga --set "algorithm.alpha=$alpha"
    run "bc-$alpha-$seed" --set "seed=$seed" --set algorithm.rule=bc --set "algorithm.alpha=$alpha"
    run "cosine-$alpha-$seed" --set "seed=$seed" --set algorithm.rule=wga --set "algorithm.alpha=$alpha" \
      --set algorithm.weights=cosine
  done
done
fedloom compare "$out"
