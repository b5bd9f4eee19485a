#!/bin/sh
# Table 1 of papers/003 for one dataset: pFedBayes, FedAvg and Local on the small, medium and large partitions, three seeds.
#   experiments/pfedbayes-table-1.sh [fashion-mnist|mnist] [rounds]
# Interrupted, it goes on where it was. FEDLOOM_RUNS: where the runs lie (default runs/pfedbayes).
set -eu
cd "$(dirname "$0")/.."
dataset=${1:-fashion-mnist}
rounds=${2:-700}
runs=${FEDLOOM_RUNS:-runs/pfedbayes}/$dataset

cell() { # size train_per_class test_per_class validation_fraction seed method overrides...
    size=$1 train=$2 test=$3 validation=$4 seed=$5 method=$6
    shift 6
    .venv/bin/fedloom run experiments/pfedbayes-fashion-mnist.yaml --out "$runs/$size-$seed/$method" --resume \
        --set name="pfedbayes-$dataset-$size" --set seed="$seed" --set data.dataset="$dataset" \
        --set data.partition.train_per_class="$train" --set data.partition.test_per_class="$test" \
        --set data.validation_fraction="$validation" --set federation.rounds="$rounds" "$@"
}

sizes() { # seed
    for size in "small 50 950 0.5" "medium 200 800 0.25" "large 900 300 0.05"; do
        # shellcheck disable=SC2086 # the words of a size are arguments
        cell $size "$1" pfedbayes
        # shellcheck disable=SC2086
        cell $size "$1" fedavg \
            --set "algorithm={name: fedavg, weighting: uniform, local: {steps: 10, batch_size: 50, lr: 0.01, momentum: 0.0}}"
        # shellcheck disable=SC2086
        cell $size "$1" local --set federation.rounds=0 \
            --set "algorithm={name: local, local: {epochs: 50, batch_size: 50, lr: 0.01}}"
    done
}

for seed in 1 2 3; do sizes "$seed"; done
