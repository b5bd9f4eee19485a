#!/bin/sh
# papers/002, Experiment 2 and its sweeps. Every method gets the same grid of step sizes and three seeds; FedAvg adapts by
# one step, as in the paper; FedMAML (eq. 7) is ComFedL-DAMAML at a γ so large that all clients weigh the same. The
# sweeps over ρ, τ and γ keep one step size, RATE, as the paper's do. Interrupted, it goes on where it was.
#
#   experiments/comfedl-damaml.sh                   Fashion-MNIST, all parts
#   experiments/comfedl-damaml.sh cifar10 methods   CIFAR-10 (long), one part: methods | rho | tau | gamma
#
set -eu
cd "$(dirname "$0")/.."
dataset=${1:-fashion-mnist}
parts=${2:-methods rho tau gamma}
case $dataset in
    fashion-mnist) experiment=experiments/comfedl-damaml.yaml sizes=", train_per_client: 500, test_per_client: 500" ;;
    cifar10) experiment=experiments/comfedl-cifar10.yaml sizes= ;;
    *)
        echo "data set: found $dataset; allowed: fashion-mnist, cifar10" >&2
        exit 2
        ;;
esac
runs=${FEDLOOM_RUNS:-runs/comfedl-damaml}/$dataset
seeds=${SEEDS:-1,2,3}
rate=${RATE:-0.1}
rates=algorithm.local.lr=${RATES:-0.05,0.1,0.2}
fedavg="algorithm={name: fedavg, weighting: uniform, personalize_steps: 1, local: {steps: 5, batch_size: 32, momentum: 0.0, lr: 0.1}}"

sweep() { # folder, options...; runs that leave the finite range are results, too (exit code 5)
    out="$runs/$1"
    shift
    .venv/bin/fedloom run "$experiment" --out "$out" --resume "$@" || [ $? -eq 5 ]
}

for part in $parts; do
    case $part in
        methods) # Figure 4
            sweep methods/fedavg --seeds "$seeds" --grid "$rates" --set "$fedavg"
            sweep methods/fedmaml --seeds "$seeds" --grid "$rates" --set algorithm.gamma=1.0e9
            sweep methods/comfedl --seeds "$seeds" --grid "$rates"
            sweep methods/comfedl-largest --seeds "$seeds" --grid "$rates" --set algorithm.scale=largest
            sweep methods/comfedl-first-order --seeds "$seeds" --grid "$rates" --set algorithm.first_order=true
            .venv/bin/fedloom compare "$runs/methods"/* --out "$runs/methods-comparison"
            ;;
        rho) # Figure 6
            for rho in 0.1 0.28 0.46 0.64 0.82; do
                partition="data.partition={scheme: dominant, clients: 10, rho: $rho$sizes}"
                sweep "rho/$rho/fedavg" --seeds "$seeds" --set "$partition" --set "$fedavg" --set "algorithm.local.lr=$rate"
                sweep "rho/$rho/comfedl" --seeds "$seeds" --set "$partition" --set "algorithm.local.lr=$rate"
            done
            ;;
        tau) # Figure 5, top
            sweep tau --seeds "$seeds" --set "algorithm.local.lr=$rate" --grid algorithm.local.steps=1,2,5,10
            ;;
        gamma) # Figure 5, bottom
            sweep gamma --seeds "$seeds" --set "algorithm.local.lr=$rate" --grid algorithm.gamma=0.1,0.5,1,5
            ;;
        *)
            echo "part: found $part; allowed: methods, rho, tau, gamma" >&2
            exit 2
            ;;
    esac
done
