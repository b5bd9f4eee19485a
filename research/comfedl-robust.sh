#!/bin/sh
# Runs of Experiment 1 of papers/002 and its sweeps. Every method is searched over the paper's grid of step sizes (§5.3)
# with three seeds. Methods are compared by seven more seeds at the step size with the highest validation accuracy. The
# sweeps over γ and τ have three step sizes each. Results: docs/results/comfedl.md; tables: research/results.py. An
# interrupted script resumes.
#
#   research/comfedl-robust.sh                       Fashion-MNIST, all parts
#   research/comfedl-robust.sh mnist methods         one data set, one part: methods | fresh | literal | step | gamma | tau
set -eu
cd "$(dirname "$0")/.."
dataset=${1:-fashion-mnist}
parts=${2:-methods fresh literal step gamma tau}
runs=${FEDLOOM_RUNS:-runs/comfedl-robust}/$dataset
seeds=${SEEDS:-1,2,3}
fresh=${FRESH:-4-10}
rates=algorithm.local.lr=0.001,0.01,0.05,0.1,0.2,0.5,1
decades=algorithm.local.lr=0.01,0.1,1
sizes="clients: 10, large_size: 5000, small_size: 20, test_per_client: 200"
mixes=${MIXES:-iid dominant two-classes}
methods="fedavg-examples fedavg-uniform comfedl-largest comfedl-normalized"

sweep() { # folder, options...; a run that diverges (exit code 5) is a result, too
    out="$runs/$1"
    shift
    .venv/bin/fedloom run experiments/comfedl-robust.yaml --out "$out" --resume --set "data.dataset=$dataset" "$@" || [ $? -eq 5 ]
}

partition() { # iid | dominant | two-classes
    case $1 in
        iid) echo "data.partition={scheme: imbalanced, $sizes}" ;;
        dominant) echo "data.partition={scheme: imbalanced, $sizes, dominant_share: 0.5}" ;;
        two-classes) echo "data.partition={scheme: imbalanced, $sizes, classes_per_client: 2}" ;;
    esac
}

method() { # one of $methods
    case $1 in
        fedavg-*) echo "algorithm={name: fedavg, weighting: ${1#fedavg-}, local: {steps: 5, batch_size: 32, momentum: 0.0, lr: 0.1}}" ;;
        comfedl-*) echo "algorithm.scale=${1#comfedl-}" ;;
    esac
}

for part in $parts; do
    case $part in
        methods) # Figure 2
            for mix in $mixes; do
                for method in $methods; do
                    sweep "$mix/$method" --seeds "$seeds" --set "$(partition $mix)" --set "$(method "$method")" --grid "$rates"
                done
            done
            ;;
        fresh) # the chosen step sizes with seeds that were not used to choose them
            for mix in $mixes; do
                for method in $methods; do
                    rate=$(.venv/bin/python research/results.py chosen "$runs/$mix/$method")
                    sweep "$mix-fresh/$method" --seeds "$fresh" --set "$(partition $mix)" --set "$(method "$method")" \
                        --set "algorithm.local.lr=$rate"
                done
            done
            ;;
        literal) # the unscaled factor exp(f/γ)/γ, at every γ of §5.3 and at 0.2
            for mix in iid two-classes; do
                sweep "literal/$mix" --set "$(partition $mix)" --grid algorithm.gamma=0.1,0.2,0.5,1,5 --grid "$rates" \
                    --set algorithm.scale=literal
            done
            ;;
        step) # the scaled factors, computed from each step's batch (line 11) and not kept for the round
            for scale in largest normalized; do
                sweep "step/$scale" --grid "$rates" --set "algorithm.scale=$scale" --set algorithm.factor_at=step
            done
            ;;
        gamma) # Figure 3, bottom
            sweep gamma --set "$(partition two-classes)" --grid algorithm.gamma=0.1,0.2,0.5,1,2,5 --grid "$decades"
            ;;
        tau) # Figure 3, top
            sweep tau --set "$(partition two-classes)" --grid algorithm.local.steps=1,2,5,10,20 --grid "$decades"
            ;;
        *)
            echo "part must be one of methods, fresh, literal, step, gamma, tau (got $part)" >&2
            exit 2
            ;;
    esac
done
