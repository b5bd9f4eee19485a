#!/bin/sh
# papers/002, Experiment 1 and its sweeps. Every method gets the paper's grid of step sizes (§5.3) and three seeds; each
# sweep ends in a comparison whose best setting is that of validation. The sweeps over γ and τ keep one step size, RATE,
# as the paper's do. Interrupted, it goes on where it was.
#
#   experiments/comfedl-robust.sh                       Fashion-MNIST, all parts
#   experiments/comfedl-robust.sh mnist methods         one data set, one part: methods | literal | step | gamma | tau
#
set -eu
cd "$(dirname "$0")/.."
dataset=${1:-fashion-mnist}
parts=${2:-methods literal step gamma tau}
runs=${FEDLOOM_RUNS:-runs/comfedl-robust}/$dataset
seeds=${SEEDS:-1,2,3}
rate=${RATE:-0.01}
rates=algorithm.local.lr=0.001,0.01,0.05,0.1,0.2,0.5,1
sizes="clients: 10, large_size: 5000, small_size: 20, test_per_client: 200"
plain="batch_size: 32, momentum: 0.0"

sweep() { # folder, options...; runs that leave the finite range are results, too (exit code 5)
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

for part in $parts; do
    case $part in
        methods) # Figure 2
            for mix in iid dominant two-classes; do
                for weighting in examples uniform; do
                    sweep "$mix/fedavg-$weighting" --seeds "$seeds" --set "$(partition $mix)" --grid "$rates" \
                        --set "algorithm={name: fedavg, weighting: $weighting, local: {steps: 5, $plain, lr: 0.1}}"
                done
                for scale in largest normalized; do
                    sweep "$mix/comfedl-$scale" --seeds "$seeds" --set "$(partition $mix)" --grid "$rates" \
                        --set "algorithm.scale=$scale"
                done
                .venv/bin/fedloom compare "$runs/$mix"/* --out "$runs/$mix-comparison"
            done
            ;;
        literal) # the factor exp(f/γ)/γ as it stands, at every γ of §5.3
            sweep literal --grid "$rates" --grid algorithm.gamma=0.1,0.2,0.5,1,5 --set algorithm.scale=literal
            ;;
        step) # the scaled factors, taken of each step's batch (line 11) and not held over the round
            sweep step --grid "$rates" --grid algorithm.scale=largest,normalized --set algorithm.factor_at=step
            ;;
        gamma) # Figure 3, bottom
            sweep gamma --seeds "$seeds" --set "$(partition two-classes)" --set "algorithm.local.lr=$rate" \
                --grid algorithm.gamma=0.1,0.2,0.5,1,2,5
            ;;
        tau) # Figure 3, top
            sweep tau --seeds "$seeds" --set "$(partition two-classes)" --set "algorithm.local.lr=$rate" \
                --grid algorithm.local.steps=1,2,5,10,20
            ;;
        *)
            echo "part: found $part; allowed: methods, literal, step, gamma, tau" >&2
            exit 2
            ;;
    esac
done
