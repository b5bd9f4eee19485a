#!/bin/sh
# Runs of PeFLL and FedAvg with roles of Shakespeare's plays as clients (papers/001, A.3, Figures 5 and 6), at a small
# size: 40 roles, eight of them unseen, and an LSTM with 64 units as the clients' model and as PeFLL's embedding
# network. Results: docs/results/natural.md. own-steps.sh has the runs with writers of digits. An interrupted script
# resumes.
#
#   research/natural.sh             both methods; requires `fedloom data fetch shakespeare`
#   research/natural.sh pefll       one method: pefll | fedavg
#
# The step size is chosen on validation data of seen roles with seed 1, which is not tested. FEDLOOM_RUNS: folder of the
# runs (default runs/natural). OPTIONS: further options of every run, such as "--set runtime.workers=0".
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/natural}
sgd="steps: 10, batch_size: 32, clip: 5.0, momentum: 0.0"

run() { # folder, options...
    out="$runs/$1"
    shift
    # shellcheck disable=SC2086
    .venv/bin/fedloom run experiments/shakespeare-roles.yaml --out "$out" --resume --no-report ${OPTIONS:-} "$@" ||
        [ $? -eq 5 ] # divergence is a result, too
}

roles() { # method
    edge=
    case $1 in
        pefll)
            about="name: pefll, local: {$sgd}, embedding: {network: lstm, width: 64}, descriptor: {evaluate: all, standardize: first}, \
                hypernetwork: {output_relu: false}, server: {rule: adam, lr: 0.001, clip: 50.0}"
            ;;
        fedavg)
            about="name: fedavg, local: {$sgd}"
            edge=",30" # the largest of the four was the best
            ;;
        *)
            echo "method must be one of pefll, fedavg (got $1)" >&2
            exit 2
            ;;
    esac
    run "roles/search/$1" --seeds 1 --set "algorithm={$about}" --set federation.rounds=30 \
        --set evaluation.every=30 --set evaluation.own_steps=null --grid "algorithm.local.lr=0.3,1,3,10$edge"
    rate=$(.venv/bin/python research/results.py chosen "$runs/roles/search/$1")
    run "roles/test/$1" --seeds 2-4 --set "algorithm={$about}" --set "algorithm.local.lr=$rate"
}

for method in ${1:-pefll fedavg}; do roles "$method"; done
