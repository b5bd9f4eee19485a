#!/bin/sh
# Runs that measure the cost of descriptors with differential privacy (docs/results/private-descriptors.md). For a data
# set and seeds: PeFLL trained without privacy, C chosen by seen clients' validation accuracy, and new clients' accuracy
# by ε. An interrupted script resumes. WHAT is fashion-mnist, cifar10, or noisy (PeFLL on Fashion-MNIST, trained with
# clipping and noise).
#
#   research/private-descriptors.sh WHAT SEED...
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/private-descriptors}
python=${PYTHON:-.venv/bin/python}
workers=${WORKERS:-2}

train() { # DATASET FOLDER ROUNDS SEED [SETTING...]
    file="experiments/pefll-$1.yaml" out="$2" rounds="$3" seed="$4"
    shift 4
    .venv/bin/fedloom run "$file" --out "$out" --resume --no-report --set "seed=$seed" \
        --set "runtime.workers=$workers" --set data.held_out_fraction=0.2 --set evaluation.every=100 \
        --set "federation.rounds=$rounds" "$@"
}

measure() { # FOLDER C: once
    test -f "$1/measured" || { "$python" research/private_descriptors.py measure "$1" "$2" && touch "$1/measured"; }
}

what="$1"
shift
for seed in "$@"; do
    case "$what" in
    noisy)
        folder="$runs/fashion-mnist/seed=$seed"
        train fashion-mnist "$folder/noisy" 100 "$seed" --set "algorithm.descriptor={train: all, evaluate: all, standardize: first, privacy: {clip: $(cat "$folder/plain/clip"), noise_multiplier: 3.7306}}" # ε = 1 of each descriptor
        measure "$folder/noisy" "$(cat "$folder/plain/clip")"
        ;;
    *)
        rounds=200
        if test "$what" = cifar10; then rounds=100; fi
        folder="$runs/$what/seed=$seed/plain"
        train "$what" "$folder" "$rounds" "$seed"
        test -s "$folder/clip" || "$python" research/private_descriptors.py choose "$folder"
        measure "$folder" "$(cat "$folder/clip")"
        ;;
    esac
done
