#!/bin/sh
# Runs of PeFLL on two-class Fashion-MNIST with 100 and with 1000 clients, and of Local, with three seeds each. Results:
# docs/results/pefll-fashion-mnist.md. An interrupted script resumes.
#
#   research/pefll-fashion-mnist.sh            all parts, about an hour on one core
#   research/pefll-fashion-mnist.sh 1000       one part: 100 | 1000 | local
#
# FEDLOOM_RUNS: folder of the runs (default runs/pefll-fashion-mnist). OPTIONS: further options of every run.
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
        local) # the step size is not tuned
            run local --set federation.rounds=0 --set "algorithm={name: local, local: {epochs: 20, lr: 0.005, clip: 50.0}}"
            ;;
        *)
            echo "part must be one of 100, 1000, local (got $part)" >&2
            exit 2
            ;;
    esac
done
