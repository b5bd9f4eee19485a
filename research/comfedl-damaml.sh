#!/bin/sh
# Runs of Experiment 2 of papers/002 and its sweeps. Every method is searched over the same grid of step sizes with seed
# 1. The step size with the highest validation accuracy is run with two more seeds, and used in the sweeps over ρ, τ and
# γ (seed 1). FedAvg adapts by one step, as in the paper. FedMAML (eq. 7) is ComFedL-DAMAML with a γ so large that all
# clients have the same weight. Results: docs/results/comfedl.md; tables: research/results.py. An interrupted script
# resumes.
#
#   research/comfedl-damaml.sh                      Fashion-MNIST, all parts: methods | seeds | rho | tau | gamma | all | edge
#   research/comfedl-damaml.sh fashion-mnist rho    one part
#   research/comfedl-damaml.sh cifar10              CIFAR-10: search (20 rounds, equally many settings for each method), then
#                                                      table (the chosen settings; 15 minutes a run on an idle core, FedAvg
#                                                      3) and all (ComFedL-DAMAML with clients' factors from the loss of
#                                                      all their data)
set -eu
cd "$(dirname "$0")/.."
dataset=${1:-fashion-mnist}
case $dataset in
    fashion-mnist)
        experiment=experiments/comfedl-damaml.yaml sizes=", train_per_client: 500, test_per_client: 500"
        parts=${2:-methods seeds rho tau gamma all edge}
        ;;
    cifar10) experiment=experiments/comfedl-cifar10.yaml sizes= parts=${2:-search table all} ;;
    *)
        echo "data set must be one of fashion-mnist, cifar10 (got $dataset)" >&2
        exit 2
        ;;
esac
runs=${FEDLOOM_RUNS:-runs/comfedl-damaml}/$dataset
seeds=${SEEDS:-2,3}
rates=algorithm.local.lr=${RATES:-0.05,0.1,0.2}
methods="fedavg fedmaml comfedl"

sweep() { # folder, method, options...; a run that diverges (exit code 5) is a result, too
    out="$runs/$1"
    case $2 in
        fedavg) set -- "$@" --set "algorithm={name: fedavg, weighting: uniform, personalize_steps: 1, local: {steps: 5, batch_size: 32, momentum: 0.0, lr: 0.1}}" ;;
        fedmaml) set -- "$@" --set algorithm.gamma=1.0e9 ;;
        damaml-first-order) set -- "$@" --set algorithm.first_order=true ;;
    esac
    shift 2
    .venv/bin/fedloom run "$experiment" --out "$out" --resume --set runtime.workers="${WORKERS:-2}" "$@" || [ $? -eq 5 ]
}

chosen() { # method
    chosen_at "methods/$1" algorithm.local.lr
}

chosen_at() { # folder, key
    .venv/bin/python research/results.py chosen "$runs/$1" "$2"
}

short="--seeds 1 --set federation.rounds=20 --set evaluation.every=20"
for part in $parts; do
    case $part in
        search)
            for method in fedmaml comfedl; do
                sweep "search/$method" "$method" $short --grid algorithm.inner_lr=0.01,0.03 --grid algorithm.local.lr=0.02,0.05,0.1
            done
            sweep search/fedavg fedavg $short --grid algorithm.local.lr=0.01,0.02,0.05,0.1,0.2,0.5
            ;;
        table)
            for method in $methods; do # the search chose 0.05, and 0.01 for the inner step, for all three
                sweep "chosen/$method" "$method" --seeds "${SEEDS:-1,2}" --set algorithm.local.lr=0.05
            done
            ;;
        all) # clients' factors from the loss of all their data; FedMAML has no factors
            if [ "$dataset" = fashion-mnist ]; then
                sweep all/methods comfedl --set algorithm.losses_on=all --seeds 1 --grid "$rates"
                lr="algorithm.local.lr=$(chosen_at all/methods algorithm.local.lr)"
                sweep all/chosen comfedl --set algorithm.losses_on=all --seeds "$seeds" --set "$lr"
                sweep all/gamma comfedl --set algorithm.losses_on=all --set "$lr" --grid algorithm.gamma=0.1,1,5
                continue
            fi
            sweep all/search comfedl --set algorithm.losses_on=all $short \
                --grid algorithm.inner_lr=0.01,0.03 --grid algorithm.local.lr=0.02,0.05,0.1
            sweep all/chosen comfedl --set algorithm.losses_on=all --seeds "${SEEDS:-1,2}" \
                --set "algorithm.local.lr=$(chosen_at all/search algorithm.local.lr)" \
                --set "algorithm.inner_lr=$(chosen_at all/search algorithm.inner_lr)"
            ;;
        methods) # Figure 4: the grid
            for method in $methods damaml-first-order; do
                sweep "methods/$method" "$method" --seeds 1 --grid "$rates"
            done
            sweep first-order damaml-first-order --set "algorithm.local.lr=$(chosen comfedl)" --grid algorithm.inner_lr=0.01,0.02
            ;;
        seeds) # Figure 4: two more seeds of the settings that validation chose
            for method in $methods; do
                sweep "chosen/$method" "$method" --seeds "$seeds" --set "algorithm.local.lr=$(chosen "$method")"
            done
            ;;
        edge) # beyond the grid, for methods whose best value is at its edge
            for method in fedavg fedmaml; do
                sweep "edge/$method" "$method" --seeds 1 --set algorithm.local.lr=0.4
            done
            sweep edge/all comfedl --set algorithm.losses_on=all --seeds 1 --set algorithm.local.lr=0.4
            ;;
        rho) # Figure 6; ρ = 0.28 is in methods
            for rho in 0.1 0.46 0.64 0.82; do
                partition="data.partition={scheme: dominant, clients: 10, rho: $rho$sizes}"
                for method in fedavg comfedl; do
                    sweep "rho/$rho/$method" "$method" --seeds 1 --set "$partition" --set "algorithm.local.lr=$(chosen "$method")"
                done
            done
            ;;
        tau) # Figure 5, top; τ = 5 is in methods
            sweep tau comfedl --set "algorithm.local.lr=$(chosen comfedl)" --grid algorithm.local.steps=1,2,10
            ;;
        gamma) # Figure 5, bottom; γ = 0.5 is in methods
            sweep gamma comfedl --set "algorithm.local.lr=$(chosen comfedl)" --grid algorithm.gamma=0.1,1,5
            ;;
        *)
            echo "part must be one of methods, seeds, rho, tau, gamma, all, edge, or for cifar10 one of search, table, all (got $part)" >&2
            exit 2
            ;;
    esac
done
