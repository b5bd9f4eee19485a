# Run each method with three seeds, then compare them. Finished runs are kept: run it again after a change of the list.
set -eu
method() {      # name of the folder, then options of fedloom run
    folder=results/$1
    shift
    fedloom run experiment.yaml --seeds 1-3 --out "$folder" --resume --no-report "$@"
}

# Give every method the same chance: the same model, equally many step sizes to choose from.
method fedavg
method ditto --set 'algorithm={name: ditto, local: {epochs: 2, batch_size: 8, lr: 0.1},
    personal: {epochs: 2, batch_size: 8, lr: 0.1}, proximity: 0.1, personalize_steps: 100}'
method local --set 'algorithm={name: local, local: {epochs: 100, batch_size: 8, lr: 0.01}}' --set federation.rounds=0

fedloom compare results/fedavg results/ditto results/local --out results/comparison
