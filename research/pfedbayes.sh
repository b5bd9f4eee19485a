#!/bin/sh
# Runs of Tables 1 to 3 of papers/003. Table 1: pFedBayes, FedAvg and Local on the small, medium and large partitions,
# seeds 1 to 3; before it, the searches for their settings on MNIST medium and, for the VGG, on CIFAR-10 medium, and the
# effect of each choice that the paper leaves open. Tables 2 and 3: all settings of pFedBayes and of the other methods
# that the paper lists, on medium.
#
#   research/pfedbayes.sh                        Table 1 without CIFAR-10
#   research/pfedbayes.sh tune                   one part: tune | choices | fashion-mnist | mnist | kept | table-2 | table-3 |
#                                                   tune-cifar10 | cifar10 | batch-norm
#   research/pfedbayes.sh table-2 mnist          one data set of table-2 or table-3
#   SIZES=large ROUNDS=800 research/pfedbayes.sh mnist
#
# An interrupted script resumes; with larger ROUNDS, finished runs continue. `python research/results.py` makes the
# tables and the figure. FEDLOOM_RUNS: folder of the runs (default runs/pfedbayes). WORKERS: number of worker processes
# (default 0: train in one process). SEEDS: default 1-3; for CIFAR-10, seed 1 is reported. ROUNDS: default 700 for
# Fashion-MNIST medium and large, 200 and 400 for CIFAR-10 small and large, 300 for the others.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/pfedbayes}
seeds=${SEEDS:-1-3}
sizes=${SIZES:-small medium large}
fedavg="algorithm={name: fedavg, weighting: uniform, local: {steps: 10, batch_size: 50, lr: 0.1, momentum: 0.9}}"
local="algorithm={name: local, local: {steps: 1000, batch_size: 50, lr: 0.3, momentum: 0.0}}"
fedavg_vgg="algorithm={name: fedavg, weighting: uniform, local: {steps: 10, batch_size: 25, lr: 0.05, momentum: 0.5}}"
local_vgg="algorithm={name: local, local: {steps: 1000, batch_size: 25, lr: 0.005, momentum: 0.9}}"

run() { # dataset size out options...
    dataset=$1 size=$2 out=$runs/$3
    shift 3
    file=experiments/pfedbayes-fashion-mnist.yaml
    [ "$dataset" = cifar10 ] && file=experiments/pfedbayes-cifar10.yaml
    from=rest
    case $dataset-$size in # training and test images of each label; validation images, as a fraction of the first
        cifar10-small) train=25 test=475 validation=0.5 ;;
        cifar10-medium) train=100 test=400 validation=0.5 ;;
        cifar10-large) train=450 test=150 validation=0.1 from=train ;; # 20 clients use up every image
        *-small) train=50 test=950 validation=0.5 ;;
        *-medium) train=200 test=800 validation=0.5 ;;
        *-large) train=900 test=300 validation=0.05 ;;
    esac
    .venv/bin/fedloom run "$file" --out "$out" --resume --workers "${WORKERS:-0}" \
        --set name="pfedbayes-$dataset-$size" --set data.dataset="$dataset" \
        --set data.partition.train_per_class="$train" --set data.partition.test_per_class="$test" \
        --set data.partition.validation_from="$from" --set data.validation_fraction="$validation" "$@" ||
        [ $? -eq 5 ] # in a grid, divergence is a result, too
}

search() { # method, its rounds, options...
    method=$1 searched=$2
    shift 2
    run mnist medium "tune/$method" --set federation.rounds="$searched" --set evaluation.every=80 "$@"
}

tune() { # one seed; 16 settings for each method: a grid of 12, and 4 beyond its edge or around the best
    search pfedbayes 80 --grid algorithm.lr_personal=0.001,0.003,0.01 --grid algorithm.lr_global=0.001,0.003 \
        --grid algorithm.zeta=1,10
    search pfedbayes 80 --grid algorithm.lr_personal=0.003,0.01 --grid algorithm.lr_global=0.01 \
        --grid algorithm.zeta=1,10
    search fedavg 80 --set "$fedavg" --grid algorithm.local.lr=0.01,0.03,0.1,0.3 \
        --grid algorithm.local.momentum=0.0,0.5,0.9
    search fedavg 80 --set "$fedavg" --grid algorithm.local.lr=0.05,0.2 --grid algorithm.local.momentum=0.5,0.9
    search local 0 --set "$local" --grid algorithm.local.lr=0.01,0.03,0.1,0.3 --grid algorithm.local.steps=300,1000,3000
    search local 0 --set "$local" --grid algorithm.local.lr=0.5,1.0 --grid algorithm.local.steps=300,1000
}

kept() { # Table 1 without CIFAR-10, with Adam's moments kept between visits: the same 16 settings, and the chosen ones
    # (an hour of a core)
    moments="--set algorithm.moments=kept"
    # shellcheck disable=SC2086
    {
        search pfedbayes-kept 80 $moments --grid algorithm.lr_personal=0.001,0.003,0.01 \
            --grid algorithm.lr_global=0.001,0.003 --grid algorithm.zeta=1,10
        search pfedbayes-kept 80 $moments --grid algorithm.lr_personal=0.003,0.01 --grid algorithm.lr_global=0.01 \
            --grid algorithm.zeta=1,10
        search pfedbayes-kept 80 $moments --grid algorithm.lr_personal=0.03 --grid algorithm.lr_global=0.003,0.01 \
            --grid algorithm.zeta=1,10 # beyond the best of the 16; none of these is better
        for data in mnist fashion-mnist; do
            for size in $sizes; do
                run "$data" "$size" "kept/$data/$size" --seeds "$seeds" --set federation.rounds="$(rounds "$data-$size")" \
                    $moments $(best tune/pfedbayes-kept lr_personal lr_global zeta)
            done
            run "$data" small "kept-zeta/$data" --seeds 1 --set federation.rounds=300 $moments \
                $(best tune/pfedbayes-kept lr_personal lr_global) --grid algorithm.zeta=1,2.5
        done
    }
}

choices() { # short runs, each with one change; tune has the unchanged settings
    for change in algorithm.steps=5,20 algorithm.batch_size=20,100 algorithm.samples=2 algorithm.reset=true \
        algorithm.aggregation=moments algorithm.beta=0.5; do
        run mnist medium "choices/${change%%=*}" --set federation.rounds=80 --set evaluation.every=80 --grid "$change"
    done
}

search_vgg() { # method, its rounds, options...; fewer test images, which are assigned last, leave all others as in the table
    method=$1 searched=$2
    shift 2
    run cifar10 medium "tune-cifar10/$method" --set data.partition.test_per_class=20 --set federation.rounds="$searched" \
        --set evaluation.every=40 "$@"
}

tune_cifar10() { # one seed; 13 settings for each method: a grid, and values around its best
    draws="--set algorithm.draws=5"
    search_vgg pfedbayes 40 $draws --set algorithm.zeta=1 --grid algorithm.rho=-5,-4,-2.5 --grid algorithm.lr_personal=0.001,0.003
    search_vgg pfedbayes 40 $draws --set algorithm.zeta=1 --grid algorithm.rho=-4,-3.25 --grid algorithm.lr_personal=0.003,0.01
    search_vgg pfedbayes 40 $draws --grid algorithm.zeta=0.03,0.1,0.3,10
    search_vgg fedavg 40 --set "$fedavg_vgg" --grid algorithm.local.lr=0.01,0.03,0.1,0.2 --grid algorithm.local.momentum=0.0,0.9
    search_vgg fedavg 40 --set "$fedavg_vgg" --grid algorithm.local.lr=0.03,0.05,0.1 --grid algorithm.local.momentum=0.5
    search_vgg fedavg 40 --set "$fedavg_vgg" --grid algorithm.local.lr=0.05 --grid algorithm.local.momentum=0.0,0.9
    local300="--set algorithm.local.steps=300"
    search_vgg local 0 --set "$local_vgg" $local300 --grid algorithm.local.lr=0.01,0.03,0.1,0.2 --grid algorithm.local.momentum=0.0,0.9
    search_vgg local 0 --set "$local_vgg" $local300 --grid algorithm.local.lr=0.005,0.02 --grid algorithm.local.momentum=0.9
    search_vgg local 0 --set "$local_vgg" $local300 --grid algorithm.local.lr=0.02,0.05 --grid algorithm.local.momentum=0.5
    search_vgg local 0 --set "$local_vgg" --grid algorithm.local.steps=1000
}

batch_norm() { # the VGG with batch normalization: six settings for each method, and the small size as the paper trains it
    norm="--set model.norm=batch"
    draws="--set algorithm.draws=5"
    # shellcheck disable=SC2086
    {
        search_vgg norm-pfedbayes 40 $norm $draws --set algorithm.zeta=1 --grid algorithm.rho=-4,-2.5 --grid algorithm.lr_personal=0.001,0.003
        search_vgg norm-pfedbayes 40 $norm $draws --grid algorithm.rho=-4 --grid algorithm.lr_personal=0.001,0.003 --grid algorithm.zeta=0.1
        search_vgg norm-fedavg 40 $norm --set "$fedavg_vgg" --grid algorithm.local.lr=0.03,0.05,0.1 --grid algorithm.local.momentum=0.5,0.9
        search_vgg norm-local 0 $norm --set "$local_vgg" --set algorithm.local.steps=300 \
            --grid algorithm.local.lr=0.005,0.01,0.02 --grid algorithm.local.momentum=0.5,0.9
        all="$norm --seeds 1 --set federation.rounds=60 --set federation.clients_per_round=20 --set evaluation.every=30"
        run cifar10 small norm-small/pfedbayes $all --set algorithm.steps=20 --set algorithm.averaged=10 \
            $(best tune-cifar10/norm-pfedbayes zeta rho lr_personal)
        run cifar10 small norm-small/fedavg $all --set "$fedavg_vgg" --set algorithm.local.steps=20 $(best tune-cifar10/norm-fedavg local.lr local.momentum)
        run cifar10 small norm-small/local $all --set "$local_vgg" --set federation.rounds=0 --set algorithm.local.steps=1200 \
            $(best tune-cifar10/norm-local local.lr local.momentum)
    }
}

best() { # search, keys; prints the chosen values
    searched=$runs/$1
    shift
    for key in "$@"; do
        echo "--set algorithm.$key=$(.venv/bin/python research/results.py chosen "$searched" "algorithm.$key")"
    done
}

rounds() { # dataset-size
    case $1 in
        fashion-mnist-medium | fashion-mnist-large) echo "${ROUNDS:-700}" ;;
        cifar10-large) echo "${ROUNDS:-400}" ;;
        cifar10-small) echo "${ROUNDS:-200}" ;;
        *) echo "${ROUNDS:-300}" ;;
    esac
}

table() { # dataset
    if [ "$1" = cifar10 ]; then fedavg=$fedavg_vgg local=$local_vgg; fi
    for size in $sizes; do
        length="--set federation.rounds=$(rounds "$1-$size")"
        # shellcheck disable=SC2086
        run "$1" $size "$1/$size/pfedbayes" --seeds "$seeds" $length
        # shellcheck disable=SC2086
        run "$1" $size "$1/$size/fedavg" --seeds "$seeds" $length --set "$fedavg"
        run "$1" $size "$1/$size/local" --seeds "$seeds" --set federation.rounds=0 --set "$local"
    done
}

table_2() { # dataset; of pFedBayes, with Adam's moments kept as in its code
    kept="--set algorithm.moments=kept --set federation.rounds=150 --set evaluation.every=150 --seeds $seeds"
    # shellcheck disable=SC2086
    {
        run "$1" medium "table-2/$1/rho" $kept --set algorithm.zeta=10 --grid algorithm.rho=-1,-2,-3 \
            --grid algorithm.lr_personal=0.001,0.005 --grid algorithm.lr_global=0.001,0.005
        kept="$kept --set algorithm.lr_personal=0.001 --set algorithm.lr_global=0.001"
        run "$1" medium "table-2/$1/rho-between" $kept --set algorithm.zeta=10 --grid algorithm.rho=-1.5
        run "$1" medium "table-2/$1/zeta" $kept --set algorithm.rho=-2.5 --grid algorithm.zeta=0.5,1,5,10,20
        run "$1" medium "table-2/$1/still" $kept --set algorithm.zeta=10 --set algorithm.noise=0.001 \
            --grid algorithm.rho=-1,-1.5,-2,-2.5,-3 # g with the deviation of public code
    }
}

rivals() { # dataset, rows of Table 3, algorithm, options...
    dataset=$1 out=table-3/$1/$2 about=$3
    shift 3
    run "$dataset" medium "$out" --seeds "$seeds" --set federation.rounds=150 --set evaluation.every=150 \
        --set "algorithm=$about" "$@"
}

table_3() { # dataset; one step size for both of a method's models where the paper gives one; its K, R and b are ours
    sgd="steps: 10, batch_size: 50, momentum: 0.0"
    rates="--grid algorithm.local.lr=0.0005,0.001,0.005,0.01"
    pfedme="{name: pfedme, weighting: uniform, steps: 10, batch_size: 50, proximity: 15, personalize_epochs: 10"
    # shellcheck disable=SC2086
    {
        rivals "$1" fedavg "{name: fedavg, weighting: uniform, local: {$sgd}}" $rates
        rivals "$1" fedprox "{name: fedprox, weighting: uniform, mu: 0.001, local: {$sgd}}" $rates
        rivals "$1" fedprox-mu "{name: fedprox, weighting: uniform, local: {$sgd, lr: 0.001}}" --grid algorithm.mu=0.01,0.1,1
        for rate in 0.0005 0.001 0.005 0.01 0.1; do # η₁, and η₂, which is 0.001 in the first row
            rivals "$1" per-fedavg/$rate \
                "{name: per-fedavg, weighting: uniform, personalize_steps: 10, inner_lr: $rate, local: {$sgd, lr: $rate}}"
            [ $rate = 0.0005 ] && shared=0.001 || shared=$rate
            [ $rate = 0.1 ] || rivals "$1" pfedme/$rate "$pfedme, inner_lr: $rate, lr: $shared}" # 0.1 · λ is above 1, which is refused
        done
        rivals "$1" heurfedamp "{name: heurfedamp, local: {$sgd}}" $rates,0.1 --grid algorithm.self_weight=0.1,0.5
        rivals "$1" bnfed "{name: pfnm, local: {$sgd}}" $rates,0.1,0.2,0.5
        for rate in 0.01 0.05 0.1; do # half an hour a run
            rivals "$1" pfedgp/$rate "{name: pfedgp, lr: $rate}"
        done
    }
}

for part in ${1:-tune choices fashion-mnist mnist}; do
    case $part in
        tune | choices | kept) "$part" ;;
        tune-cifar10) tune_cifar10 ;;
        batch-norm) batch_norm ;;
        table-2) for data in ${2:-mnist fashion-mnist}; do table_2 "$data"; done ;;
        table-3) for data in ${2:-mnist fashion-mnist}; do table_3 "$data"; done ;;
        fashion-mnist | mnist | cifar10) table "$part" ;;
        *)
            echo "part must be one of tune, choices, fashion-mnist, mnist, kept, table-2, table-3, tune-cifar10, cifar10, batch-norm (got $part)" >&2
            exit 2
            ;;
    esac
done
