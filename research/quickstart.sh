#!/bin/sh
# `make run`: train PeFLL, FedAvg and Local on the quickstart, and compare what each client would get. An interrupted run
# resumes. `research/quickstart.sh 2-4` runs these seeds, in a folder named after ATEN_CPU_CAPABILITY (native if unset);
# `research/quickstart.sh search` tries local rates on seed 1.
# Settings and how they were chosen: docs/results/quickstart.md
set -eu
cd "$(dirname "$0")/.."
local="batch_size: 10, clip: 50.0"

run() {
    out="$runs/$1"
    shift
    [ ! -e "$out" ] || set -- --resume "$@"
    .venv/bin/fedloom run experiments/quickstart.yaml --out "$out" "$@"
}

if [ "${1:-}" = search ]; then
    runs=${FEDLOOM_RUNS:-runs/quickstart}/search-seen
    for rate in 0.003 0.01 0.03 0.1; do
        run "pefll-$rate" --no-report --set "algorithm.local.lr=$rate"
        run "fedavg-$rate" --no-report --set "algorithm={name: fedavg, local: {$local, steps: 5, lr: $rate}}"
        run "local-$rate" --no-report --set "algorithm={name: local, local: {$local, steps: 100, lr: $rate}}" \
            --set federation.rounds=0
    done
    exit
fi

runs=${FEDLOOM_RUNS:-runs/quickstart}${1:+/${ATEN_CPU_CAPABILITY:-native}}
own="evaluation.own_steps=[0, 1, 2, 5, 10, 20, 50]"
seeds=${1:+--seeds $1}
# shellcheck disable=SC2086 # no word where there are no seeds
{
    run pefll $seeds --set "$own"
    run fedavg $seeds --set "$own" --set "algorithm={name: fedavg, local: {$local, steps: 5, lr: 0.03}, personalize_steps: 20}"
    run local $seeds --set "$own" --set "algorithm={name: local, local: {$local, steps: 100, lr: 0.01}}" --set federation.rounds=0
}
.venv/bin/fedloom compare "$runs/pefll" "$runs/fedavg" "$runs/local" --out "$runs/comparison"
.venv/bin/python research/quickstart_expected.py "$runs"
