#!/bin/sh
# PeFLL on two-class Fashion-MNIST with 100 and with 1000 clients, and Local beside it, three seeds each. Interrupted, it
# goes on where it was; what came out is docs/results/pefll-fashion-mnist.md.
#
#   research/pefll-fashion-mnist.sh            all, an hour of one core
#   research/pefll-fashion-mnist.sh 1000       one part: 100 | 1000 | local
#
# FEDLOOM_RUNS: where the runs lie (default runs/pefll-fashion-mnist). OPTIONS: more options of every run.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/pefll-fashion-mnist}

run() { # folder, options...
    out="$runs/$1"
    shift
    # shellcheck disable=SC2086
    .venv/bin/fedloom run experiments/pefll-fashion-mnist.yaml --out "$out" --resume --no-report --seeds 1-3 ${OPTIONS:-} "$@"
}

for part in ${1:-100 1000 local}; do
    case $part in
        100 | 1000) run "n=$part" --set data.partition.clients="$part" ;;
        local) # the rate not tuned
            run local --set federation.rounds=0 --set "algorithm={name: local, local: {epochs: 20, lr: 0.005, clip: 50.0}}"
            ;;
        *)
            echo "part: found $part; allowed: 100, 1000, local" >&2
            exit 2
            ;;
    esac
done
