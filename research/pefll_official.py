"""Authors' PeFLL code, unmodified, on a run's clients: a check that both are the same method.

    git clone https://github.com/jonnyascott/PeFLL CHECKOUT
    pip install tqdm
    OMP_NUM_THREADS=1 python research/pefll_official.py CHECKOUT RUN [--rounds 201] [--every 100] [--lr 0.002]

The training, the networks, the optimizers and the evaluation are theirs; only the partition is ours. Prints their
validation accuracy, unmasked, of seen and unseen clients, in percent, and writes it to RUN/authors.json, which
`research/results.py fold` reads. About 2.5 s a round.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkouts
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedloom.data.federated import FederatedDataset, Split
from fedloom.data.inputs import single


def loader(split: Split, classes: int, batch_size: int, *, train: bool) -> Any:
    """Return a split in the form of the authors' code: batches of normalized images and one-hot labels."""
    assert split.y is not None
    one_hot = F.one_hot(split.y.long(), classes).float()
    return DataLoader(TensorDataset(single(split.x), one_hot), batch_size=batch_size, shuffle=train, drop_last=train)


def nodes(dataset: FederatedDataset, batch_size: int) -> SimpleNamespace:
    """Return all clients, seen ones first, as the authors' code orders them."""
    entries = sorted(dataset.manifest.clients, key=lambda entry: not entry.seen)
    clients = [dataset.client(entry.id) for entry in entries]
    classes = dataset.manifest.spec.classes
    return SimpleNamespace(
        train_loaders=[loader(c.train, classes, batch_size, train=True) for c in clients],
        val_loaders=[loader(c.validation, classes, batch_size, train=False) for c in clients],
        test_loaders=[loader(c.test, classes, batch_size, train=False) for c in clients],
    )


def main() -> None:
    """Train with the checkout's defaults (Adam, lr 2e-4; client weight decay 5e-5) and print its results."""
    arguments = checkouts.parser(__doc__, rounds=201, every=100, lr=0.002)
    given, dataset = checkouts.opened(arguments, file="train.py", checkout="a checkout of the authors' code")
    train: Any = importlib.import_module("train")
    utils: Any = importlib.import_module("utils")
    evaluate = train.eval_model
    lines: list[dict[str, float]] = []
    groups = {"train_nodes": "seen", "test_nodes": "unseen"}

    def shown(*about: Any, **more: Any) -> Any:
        results = evaluate(*about, **more)
        found = {groups[name]: round(100 * of["avg_acc"], 4) for name, of in results[0].items()}
        if more["split"] == "test":
            lines.append({"round": min(len(lines) * given.every + 1, given.rounds), **found})
        else:
            lines[-1] |= {"validation": found["seen"], "validation_unseen": found["unseen"]}
            (given.run / "authors.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
            print(f"round {lines[-1]['round']}: seen {found['seen']:.1f}, unseen {found['unseen']:.1f}", flush=True)
        return results

    train.BaseNodes = lambda *_, batch_size, **__: nodes(dataset, batch_size)
    train.eval_model = shown
    utils.set_seed(given.seed)
    torch.set_num_threads(1)
    manifest = dataset.manifest
    with (
        tempfile.TemporaryDirectory() as results,
        contextlib.chdir(results),
    ):  # it saves checkpoints in the working directory
        train.train(
            data_name="cifar10",
            data_path="",
            classes_per_node=2,
            num_nodes=len(manifest.clients),
            num_train_nodes=sum(entry.seen for entry in manifest.clients),
            clients_per_step=5,
            partition_type="by_class",
            alpha_train=0.1,
            alpha_test=0.1,
            steps=given.rounds,
            inner_steps=50,
            optim="adam",
            lr=2e-4,
            inner_lr=given.lr,
            embed_lr=None,
            wd=1e-3,
            inner_wd=5e-5,
            embed_dim=-1,
            embed_hid=20,
            embed_nlayers=3,
            embed_batches=1,
            embed_split="train",
            embed_y=True,
            embed_model="cnn",
            hyper_hid=100,
            hyper_nhid=3,
            n_kernels=16,
            bs=32,
            device="cpu",
            eval_every=given.every,
            save_path=Path(results),
            mask_absent=False,
            seed=given.seed,
        )


if __name__ == "__main__":
    main()
