#!/bin/sh
# Runs that measure accuracy with differential privacy of clients (docs/results/training-privacy.md): FedAvg and FedRep
# on five-class Fashion-MNIST and on writers of digits, at ε of 8, 4 and 2 and without privacy. Clip and learning rate
# are chosen on validation data of seed 0, which is not tested. An interrupted script resumes.
#
#   research/training-privacy.sh DATA METHOD      fashion-mnist | writers (requires `fedloom data fetch qmnist`);
#                                                    fedavg | fedrep | local
#   research/training-privacy.sh writers pefll    new writers' models from private descriptors; PeFLL is trained without
#                                                    privacy
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
data=$1 method=$2
python=${PYTHON:-.venv/bin/python}
folder=${FEDLOOM_RUNS:-runs/training-privacy}/$data

run() { # FOLDER OPTION...
    out="$folder/$1"
    shift
    set -- --set "$about" "$@"
    if [ "$data" = writers ]; then
        set -- --set 'data={dataset: qmnist, partition: {scheme: natural, min_examples: 20}, held_out_fraction: 0.1}' \
            --set federation.clients_per_round=150 "$@"
    fi
    .venv/bin/fedloom run experiments/training-privacy.yaml --out "$out" --resume --no-report "$@"
}

chosen() { # FOLDER KEY
    "$python" research/results.py chosen "$folder/$1" "$2"
}

steps="batch_size: 10, momentum: 0.0" rates="algorithm.local.lr=0.03,0.1,0.3"
case $method in
    pefll) # step size and server as on docs/results/own-steps.md, where validation chose them
        about="algorithm={name: pefll, local: {steps: 20, batch_size: 16, clip: 50.0, lr: 0.001}, \
            descriptor: {evaluate: all, standardize: first}, server: {rule: adam, lr: 0.001, clip: 50.0}}"
        for seed in 1 2 3; do
            out=$folder/descriptors/seed=$seed
            .venv/bin/fedloom run experiments/qmnist-writers.yaml --out "$out" --resume --no-report --set "$about" \
                --set "seed=$seed" --set evaluation.every=60 --set runtime.workers=0 --set runtime.clients_at_once=10
            test -s "$out/clip" || "$python" research/private_descriptors.py choose "$out"
            test -f "$out/measured" || "$python" research/private_descriptors.py measure "$out" "$(cat "$out/clip")"
            touch "$out/measured"
        done
        exit
        ;;
    fedavg) about="algorithm={name: fedavg, weighting: uniform, local: {steps: 5, $steps}, personalize_steps: 10}" ;;
    fedrep)
        about="algorithm={name: fedrep, weighting: uniform, local: {steps: 5, $steps}, head: {steps: 10, lr: 0.1, $steps}}"
        ;;
    local)
        about="algorithm={name: local, local: {steps: 10, $steps}}"
        set -- --set federation.rounds=0 --set federation.privacy=null
        run search/local --seeds 0 "$@" --grid "$rates" --grid algorithm.local.steps=10,100
        run test/local --seeds 1-3 "$@" --set "algorithm.local.lr=$(chosen search/local algorithm.local.lr)" \
            --set "algorithm.local.steps=$(chosen search/local algorithm.local.steps)"
        exit
        ;;
    *)
        echo "method must be one of fedavg, fedrep, local (got $method)" >&2
        exit 2
        ;;
esac
run "search/$method" --seeds 0 --set federation.privacy.epsilon=8 --grid "$rates" --grid federation.privacy.clip=0.2,0.5,1
run "search/$method-inf" --seeds 0 --set federation.privacy=null --grid "$rates"
run "test/$method" --seeds 1-3 --set "algorithm.local.lr=$(chosen "search/$method" algorithm.local.lr)" \
    --set "federation.privacy.clip=$(chosen "search/$method" federation.privacy.clip)" \
    --grid federation.privacy.epsilon=8,4,2
run "test/$method-inf" --seeds 1-3 --set federation.privacy=null \
    --set "algorithm.local.lr=$(chosen "search/$method-inf" algorithm.local.lr)"
