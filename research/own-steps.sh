#!/bin/sh
# Runs that measure the effect of extra local steps on new clients: PeFLL, FedAvg and Local (docs/results/own-steps.md).
# An interrupted script resumes.
#
#   research/own-steps.sh                 vowel, fashion-mnist, mnist, and fashion-mnist-lenet, cifar10 and writers (of
#                                            QMNIST), whose clients train a LeNet; or the data sets named as arguments
#   research/own-steps.sh lambda          the grid of papers/001, Table 8, on fashion-mnist; run fashion-mnist first
#   research/own-steps.sh networks        papers/001, Tables 7 and 9, likewise: other hypernetworks and embedding networks
#
# The step size of training is the one with the highest validation accuracy of seen clients with seed 1 (vowel: seeds 1
# to 3); PeFLL and FedAvg have equally many to choose from. own_steps.py chooses the step sizes of the extra steps.
# FEDLOOM_RUNS: folder of the runs. RATE: step size for lambda if the runs of the search no longer exist.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/own-steps}
python=${PYTHON:-.venv/bin/python}

run() { # folder, options...
    out="$runs/$1"
    shift
    .venv/bin/fedloom run "experiments/$file.yaml" --out "$out" --resume --no-report "$@"
}

sgd() { # the clients' steps, at a step size
    echo "{$steps, lr: ${1:-0.01}}"
}

method() { # PeFLL or FedAvg, at a step size
    case $1 in
        pefll) echo "algorithm={name: pefll, local: $(sgd "${2:-}"), $pefll}" ;;
        fedavg) echo "algorithm={name: fedavg, local: $(sgd "${2:-}")}" ;;
    esac
}

measured() { # data set, seeds of the search, seeds, step sizes of training, of a client's own, more options
    data=$1 search=$2 seeds=$3 rates=$4 own=$5
    shift 5
    for name in pefll fedavg; do
        run "$data/search/$name" "$@" --seeds "$search" --set "evaluation.every=$rounds" \
            --set "$(method "$name")" --grid "algorithm.local.lr=$rates"
        rate=$("$python" research/results.py chosen "$runs/$data/search/$name")
        run "$data/$name" "$@" --seeds "$seeds" --set "evaluation.every=$rounds" --set "$(method "$name" "$rate")"
    done
    run "$data/local" "$@" --seeds "$seeds" --set federation.rounds=0 \
        --set "algorithm={name: local, local: {$alone, steps: 1, lr: 0.01}}"
    new=
    if [ "$file" != vowel ]; then # the partition itself has unseen speakers
        new="--partition $runs/$data/new"
        dealt_new "$data" "$@"
    fi
    # shellcheck disable=SC2086
    "$python" research/own_steps.py "$runs/$data"/*/seed=* \
        $new --rates "$own" --out "$runs/$data/own-steps"
}

dealt_new() { # data set, more options: forty clients made from the reserved examples
    out="$runs/$1/new"
    shift
    [ -e "$out" ] || .venv/bin/fedloom partition "experiments/$file.yaml" --out "$out" "$@" \
        --set seed=1000 --set data.partition.clients=40 --set data.partition.reserve.deal=true
}

sizes=0.0003,0.001,0.003,0.01,0.03,0.1,0.3
for data in ${*:-vowel fashion-mnist mnist fashion-mnist-lenet cifar10 writers}; do
    server="descriptor: {evaluate: all, standardize: first}, server: {rule: adam, lr: 0.001, clip: 50.0}"
    case $data in
        fashion-mnist | mnist)
            file=own-steps rounds=150 alone="batch_size: 16, clip: 50.0"
            steps="steps: 20, $alone" pefll=$server
            measured "$data" 1 2-4 "0.0001,0.0003,0.001,0.003,0.01,0.03,0.1" $sizes --set "data.dataset=$data"
            ;;
        fashion-mnist-lenet | cifar10)
            file=own-steps rounds=150 alone="batch_size: 16, clip: 50.0"
            steps="steps: 20, $alone" pefll=$server
            measured "$data" 1 2-4 "0.0001,0.0003,0.001,0.003,0.01,0.03" $sizes \
                --set "model={name: lenet}" --set "data.dataset=${data%-lenet}"
            ;;
        vowel)
            file=vowel rounds=150 alone="batch_size: 8, momentum: 0.0"
            steps="epochs: 2, $alone" pefll="embedding: {network: mlp}, $server"
            measured "$data" 1-3 4-9 "0.001,0.003,0.01,0.03,0.1,0.3,0.6,1.2,2.4" "0.03,0.1,0.3,0.6,1.2,2.4"
            ;;
        writers)
            file=qmnist-writers rounds=60 alone="batch_size: 16, clip: 50.0"
            steps="steps: 20, $alone" pefll=$server
            measured writers 1 2-4 "0.001,0.003,0.01,0.03,0.1" $sizes --set runtime.workers=0 \
                --set "data.partition={scheme: natural, clients: 200, min_examples: 60, reserve: {count: 60}}"
            ;;
        networks)
            file=own-steps
            dealt_new fashion-mnist
            for cell in hypernetwork.size=S hypernetwork.size=L hypernetwork.output_relu=false embedding.network=mlp; do
                cells="fashion-mnist/networks/$cell" rates=0.0001,0.0003,0.001,0.003,0.01,0.03,0.1
                [ "$cell" != embedding.network=mlp ] || rates=0.00003,$rates # 0.0001, at the edge, was the best
                run "$cells/search" --seeds 1 --set evaluation.every=150 --set "algorithm.$cell" \
                    --grid "algorithm.local.lr=$rates"
                rate=$("$python" research/results.py chosen "$runs/$cells/search")
                run "$cells/chosen" --seeds 2-4 --set evaluation.every=150 --set "algorithm.$cell" \
                    --set "algorithm.local.lr=$rate"
                "$python" research/own_steps.py "$runs/$cells/chosen"/seed=* --out "$runs/$cells/new" \
                    --partition "$runs/fashion-mnist/new" --steps 0
            done
            ;;
        lambda) # L2 in the server's Adam; the step size is the one chosen without it
            file=own-steps rate=${RATE:-$("$python" research/results.py chosen "$runs/fashion-mnist/search/pefll")}
            dealt_new fashion-mnist
            for networks in 0 1e-5 1e-3; do
                cells="fashion-mnist/lambda/networks=$networks"
                run "$cells" --seeds 2-4 --set evaluation.every=150 --set "algorithm.local.lr=$rate" \
                    --set algorithm.server.decay=l2 --set algorithm.lambda_h=$networks --set algorithm.lambda_v=$networks \
                    --grid algorithm.local.lambda_theta=0,5e-5,5e-3,5e-1
                for cell in "$runs/$cells"/*,seed=2; do
                    cell=${cell%,seed=2}
                    [ -e "$cell.new" ] || "$python" research/own_steps.py "$cell",seed=* --out "$cell.new" \
                        --partition "$runs/fashion-mnist/new" --steps 0
                done
            done
            ;;
        *)
            echo "data set must be one of vowel, fashion-mnist, mnist, fashion-mnist-lenet, cifar10, writers, lambda, networks (got $data)" >&2
            exit 2
            ;;
    esac
done
