#!/bin/sh
# What descriptors with differential privacy cost (docs/results/private-descriptors.md): two trainings of PeFLL on
# Fashion-MNIST, and new clients' accuracy by ε. Interrupted, it goes on where it was.
set -eu
cd "$(dirname "$0")/.."
runs=${FEDLOOM_RUNS:-runs/private-descriptors}
python=${PYTHON:-.venv/bin/python}

train() {
    name="$1"
    shift
    .venv/bin/fedloom run experiments/pefll-fashion-mnist.yaml --out "$runs/$name" --resume --no-report \
        --set data.unseen_fraction=0.2 --set evaluation.every=100 "$@"
}

private() { # with clipping at C, and a noise multiplier
    echo "algorithm.descriptor={train: all, evaluate: all, standardize: first, privacy: {clip: $1, noise_multiplier: $2}}"
}

train plain --set federation.rounds=200
clip=$("$python" experiments/private_descriptors.py choose "$runs/plain" | tee /dev/stderr | tail -n 1)
train noisy --set federation.rounds=100 --set "$(private "$clip" 3.7306)" # ε = 1 of each descriptor
for name in plain noisy; do
    "$python" experiments/private_descriptors.py measure "$runs/$name" "$clip"
done
"$python" experiments/results.py fold private-descriptors "$runs"
