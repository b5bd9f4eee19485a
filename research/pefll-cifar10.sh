#!/bin/sh
# Runs of papers/001 on CIFAR-10, n = 100: PeFLL, FedAvg and Local of Table 1, unmasked and masked (Table 6);
# descriptors without labels (Table 2); descriptors over training on Dirichlet(0.1) clients (Figure 3), and new clients
# with another concentration from that run (Figure 4); the effect of single settings; and new clients by whether a seen
# client has the same classes. Settings are chosen on validation data. Results: docs/results/pefll-cifar10.md.
#
#   research/pefll-cifar10.sh                 search, then table: hours a run on two cores; an interrupted script resumes
#   research/pefll-cifar10.sh unlabelled      one part: search | table | unlabelled | dirichlet | extrapolation | ablation |
#                                                regularized | many | resnet | pairs (after ablation and regularized)
#   research/pefll-cifar10.sh table fedavg    one method of search or table, one run of ablation or regularized
#   research/pefll-cifar10.sh search unlabelled                   also fedavg-pixels (see ablation)
#
# FEDLOOM_RUNS: folder of the runs (default runs/pefll-cifar10). SEEDS: default 1. ALPHAS: of extrapolation, default 0.1
# to 1.0. OPTIONS: further options of every run, such as "--set runtime.device=cuda --set runtime.clients_at_once=5" or
# "--set runtime.workers=0". Tables and figures: research/results.py.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/pefll-cifar10}
seeds=${SEEDS:-1}
sgd="batch_size: 32, momentum: 0.9, clip: 50.0"
fedavg="algorithm={name: fedavg, local: {steps: 50, $sgd, lr: 0.01}}"
flbench="algorithm={name: fedavg, local: {epochs: 5, batch_size: 32, momentum: 0.0, lr: 0.001}}"
local="algorithm={name: local, local: {epochs: 200, $sgd, lr: 0.01}}"
back="reserve: {count: 500}" # images of each class that are reserved for new clients
dirichlet="data.partition={scheme: dirichlet, clients: 100, alpha: 0.1, $back}"
classes="data.partition={scheme: classes, clients: 100, classes_per_client: 2, $back}"

unknown() { # what, found, allowed
    echo "$1 must be one of $3 (got $2)" >&2
    exit 2
}

run() { # folder, options...
    out="$runs/$1"
    shift
    # shellcheck disable=SC2086
    .venv/bin/fedloom run experiments/pefll-cifar10.yaml --out "$out" --resume ${OPTIONS:-} "$@" || [ $? -eq 5 ]
}

search() { # six settings for each method, beyond the grid where its edge is the best
    sizes="algorithm.local.lr=0.002,0.005,0.01,0.02,0.05,0.1"
    short="--set federation.rounds=200 --set evaluation.every=50"
    # shellcheck disable=SC2086
    case $1 in
        pefll)
            run search/pefll $short --grid algorithm.local.lr=0.002,0.005,0.01 --grid algorithm.hypernetwork.output_relu=true,false
            run search/pefll-lower $short --grid algorithm.local.lr=0.001,0.0005
            run search/pefll-lower-relu $short --grid algorithm.local.lr=0.001,0.0005 --grid algorithm.hypernetwork.output_relu=true
            ;;
        unlabelled) # PeFLL's rates
            run search/unlabelled $short --set algorithm.embedding.labels=false \
                --grid algorithm.local.lr=0.0005,0.001,0.002,0.005,0.01
            run search/unlabelled-lower $short --set algorithm.embedding.labels=false --grid algorithm.local.lr=0.00025
            ;;
        fedavg-pixels)
            unscaled
            run search/fedavg-pixels $short --partition "$runs/unscaled" --set "$flbench" \
                --grid algorithm.local.lr=0.0001,0.0003,0.001,0.003,0.01
            ;;
        fedavg) run search/fedavg $short --set "$fedavg" --grid $sizes ;;
        local) run search/local --set federation.rounds=0 --set "$local" --set algorithm.local.epochs=20 --grid $sizes ;;
        *) unknown search "$1" "pefll, fedavg, local, unlabelled, fedavg-pixels" ;;
    esac
}

table() {
    case $1 in
        pefll) run table/pefll --seeds "$seeds" ;;
        fedavg) run table/fedavg --seeds "$seeds" --set "$fedavg" ;;
        local) run table/local --seeds "$seeds" --set federation.rounds=0 --set "$local" ;;
        *) unknown table "$1" "pefll, fedavg, local" ;;
    esac
}

unscaled() { # the same clients; pixels from 0 to 255 are normalized by constants for pixels from 0 to 1, as in an old FL-bench
    [ -e "$runs/unscaled" ] && return
    .venv/bin/fedloom partition experiments/pefll-cifar10.yaml --out "$runs/unscaled.part"
    .venv/bin/python - "$runs/unscaled.part/partition.json" <<'END'
import json, pathlib, sys
about = json.loads((path := pathlib.Path(sys.argv[1])).read_text())
once = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
about["normalization"] = {name: [value / 255 for value in values] for name, values in once.items()}
path.write_text(json.dumps(about))
END
    mv "$runs/unscaled.part" "$runs/unscaled"
}

ablation() { # mostly short runs that differ from the table's in one setting; only validation results count
    short="--seeds $seeds --set federation.rounds=300 --set evaluation.every=100"
    # shellcheck disable=SC2086
    case $1 in
        base) run ablation/base $short --set "$classes" ;;
        float32) run ablation/float32 $short --set "$classes" --set model.precision=float32 ;;
        relu) run ablation/relu $short --set "$classes" --set algorithm.hypernetwork.output_relu=true ;;
        small) run ablation/small $short --set "$classes" --set algorithm.hypernetwork.size=S ;; # one hidden layer
        raw) run ablation/raw $short --set "$classes" --set algorithm.descriptor.standardize=none ;;
        official) # its step size, weight decay 5e-5, and no regularization on the server
            run ablation/official $short --set "$classes" --set algorithm.local.lr=0.002 --set algorithm.local.lambda_theta=0.000025 \
                --set algorithm.lambda_h=0 --set algorithm.lambda_v=0
            ;;
        unlabelled) run ablation/unlabelled --seeds "$seeds" --set algorithm.embedding.labels=false ;; # at the table's rate, full length
        fedavg) # without momentum, a slower client
            run ablation/fedavg --seeds "$seeds" --set federation.rounds=1000 --set "$fedavg" \
                --set algorithm.local.momentum=0.0
            ;;
        fedavg-epoch) # one pass over its data in a round, 13 steps
            run ablation/fedavg-epoch --seeds "$seeds" --set "$fedavg" --set algorithm.local.momentum=0.0 \
                --set algorithm.local.steps=null --set algorithm.local.epochs=1
            ;;
        fedavg-pixels) # as in FL-bench when papers/001 appeared: five passes, no momentum, no clipping, unscaled pixels
            unscaled
            run ablation/fedavg-pixels --seeds "$seeds" --set federation.rounds=3000 --partition "$runs/unscaled" --set "$flbench"
            ;;
        *) unknown ablation "$1" "base, float32, relu, small, raw, official, unlabelled, fedavg, fedavg-epoch, fedavg-pixels" ;;
    esac
}

regularized() { # a fifth of the rounds: λ of papers/001 (Table 8's best) as L2 inside Adam, and as in the table's runs
    fifth="--seeds $seeds --set federation.rounds=1000"
    weights="--set algorithm.server.decay=l2 --set algorithm.local.lambda_theta=5e-5"
    # shellcheck disable=SC2086
    case $1 in
        decoupled) run regularized/decoupled $fifth --set "$classes" ;;
        l2) run regularized/l2 $fifth --set "$classes" $weights ;;
        l2-relu) run regularized/l2-relu $fifth --set "$classes" $weights --set algorithm.hypernetwork.output_relu=true ;;
        official) # as in the authors' code: its step size, λ_θ and precision, no regularization on the server
            run regularized/official $fifth --set "$classes" --set algorithm.local.lr=0.002 --set algorithm.local.lambda_theta=0.000025 \
                --set algorithm.lambda_h=0 --set algorithm.lambda_v=0 --set model.precision=float32
            ;;
        *) unknown regularized "$1" "decoupled, l2, l2-relu, official" ;;
    esac
}

many() { # a thousand clients, a fifth of the rounds, with the settings chosen for a hundred
    thousand="data.partition={scheme: classes, clients: 1000, classes_per_client: 2}"
    fifth="--seeds $seeds --set federation.rounds=1000 --set evaluation.every=250"
    # shellcheck disable=SC2086
    case $1 in
        pefll) run many/pefll $fifth --set "$thousand" ;;
        fedavg) run many/fedavg $fifth --set "$thousand" --set "$fedavg" ;;
        *) unknown many "$1" "pefll, fedavg" ;;
    esac
}

resnet() { # ResNet20 without normalization (Figure 7) at a small size: ten steps instead of fifty, 60 rounds
    case $1 in
        pefll) about="algorithm.local.steps=10" ;;
        fedavg) about="algorithm={name: fedavg, local: {steps: 10, $sgd}}" ;;
        *) unknown resnet "$1" "pefll, fedavg" ;;
    esac
    small="--set model.name=resnet20 --set evaluation.every=20"
    # shellcheck disable=SC2086
    run "resnet/search/$1" --seeds 1 $small --set "$about" --set federation.rounds=30 --grid algorithm.local.lr=0.003,0.01,0.03
    rate=$(.venv/bin/python research/results.py chosen "$runs/resnet/search/$1")
    # shellcheck disable=SC2086
    run "resnet/test/$1" --seeds 2-4 $small --set "$about" --set federation.rounds=60 --set "algorithm.local.lr=$rate"
}

pairs() { # runs with a reserve, on 450 new two-class clients from it, by the number of seen clients with the same classes
    news=
    seed=1000
    while [ $seed -lt 1045 ]; do
        clients="$runs/clients/new-$seed"
        [ -e "$clients" ] || .venv/bin/fedloom partition experiments/pefll-cifar10.yaml --out "$clients" --set seed=$seed \
            --set "data.partition={scheme: classes, clients: 10, classes_per_client: 2, reserve: {count: 500, deal: true}}"
        news="$news $clients"
        seed=$((seed + 1))
    done
    for found in "$runs"/ablation/*/seed=1/descriptors.json "$runs"/regularized/*/seed=*/descriptors.json; do
        [ -e "$found" ] || continue
        split=test # nothing is chosen among these runs
        case $found in "$runs"/ablation/*) split=validation ;; esac
        echo "${found%/descriptors.json}, $split images"
        # shellcheck disable=SC2086
        .venv/bin/python research/pefll_pairs.py "${found%/descriptors.json}" $news --split $split
    done
}

extrapolation() { # 20 new clients of each mix, from the reserve
    for alpha in ${ALPHAS:-0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0}; do
        clients="$runs/clients/$alpha"
        [ -e "$clients" ] || .venv/bin/fedloom partition experiments/pefll-cifar10.yaml --out "$clients" --set seed=1000 \
            --set "data.partition={scheme: dirichlet, clients: 20, alpha: $alpha, reserve: {count: 500, deal: true}}"
        .venv/bin/fedloom evaluate "$runs/dirichlet/seed=1" --partition "$clients" --out "$runs/extrapolation-$alpha.json"
    done
}

for part in ${1:-search table}; do
    case $part in
        search | table) for method in ${2:-pefll fedavg local}; do "$part" "$method"; done ;;
        ablation) for one in ${2:-base float32 relu small raw official unlabelled fedavg fedavg-epoch fedavg-pixels}; do ablation "$one"; done ;;
        regularized) for one in ${2:-decoupled l2 l2-relu official}; do regularized "$one"; done ;;
        many | resnet) for method in ${2:-pefll fedavg}; do "$part" "$method"; done ;;
        extrapolation | pairs) "$part" ;;
        unlabelled) run unlabelled --seeds "$seeds" --set algorithm.embedding.labels=false --set algorithm.local.lr=0.0005 ;;
        dirichlet) run dirichlet --seeds "$seeds" --set "$dirichlet" ;;
        *) unknown part "$part" "search, table, unlabelled, dirichlet, extrapolation, ablation, regularized, many, resnet, pairs" ;;
    esac
done
