#!/bin/sh
# Runs of Alone, WGA and Bias Correction as federations: on the noisy quadratic model of papers/004, together with the
# oracle; and on Fashion-MNIST, where every client is user 0, with logistic regression and with LeNet, whose step size
# is chosen on validation data from one grid. Results: docs/results/wga.md. An interrupted script resumes.
#
#   research/wga.sh                 all parts, about half an hour on one core
#   research/wga.sh lenet           one part: quadratic | fashion-mnist | lenet | beta (LeNet, BC with β = 0.5, seed 1)
#
# FEDLOOM_RUNS: folder of the runs (default runs/wga). OPTIONS: further options of every run.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/wga}

sweep() { # part, folder, options...; runs that leave the finite range are results, too (exit code 5)
    part=$1 out="$runs/$1/$2"
    shift 2
    # shellcheck disable=SC2086
    .venv/bin/fedloom run "experiments/wga-$part.yaml" --out "$out" --resume --no-report --seeds "${seeds:-1-3}" ${OPTIONS:-} "$@" ||
        [ $? -eq 5 ]
}

rules() { # part, options of the three rules that weigh others
    part=$1
    shift
    sweep "$part" alone ${rates:-} --set algorithm.rule=alone
    sweep "$part" wga ${rates:-} --set algorithm.rule=wga "$@"
    sweep "$part" cosine ${rates:-} --set algorithm.rule=wga --set algorithm.weights=cosine "$@"
    sweep "$part" bc ${rates:-} "$@"
}

for part in ${1:-quadratic fashion-mnist lenet}; do
    case $part in
        quadratic)
            for rule in alone wga bc oracle; do
                sweep quadratic $rule --set algorithm.rule=$rule --set evaluation.every=2
            done
            ;;
        fashion-mnist) rates='' && rules fashion-mnist --grid algorithm.alpha=0.3,0.6,0.9 ;;
        lenet) rates='--grid algorithm.lr=0.03,0.1,0.3' && rules lenet ;;
        beta) seeds=1 && sweep lenet beta --set algorithm.beta=0.5 --grid algorithm.lr=0.03,0.1 ;;
        *)
            echo "part must be one of quadratic, fashion-mnist, lenet, beta (got $part)" >&2
            exit 2
            ;;
    esac
done
