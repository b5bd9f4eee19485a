"""FL-bench's FedAvg, unmodified, on a run's clients: a check of FedAvg's figures in papers/001.

    git clone https://github.com/KarhouTam/FL-bench CHECKOUT
    git -C CHECKOUT checkout 493da92
    pip install pandas
    OMP_NUM_THREADS=1 python research/pefll_flbench.py CHECKOUT RUN [--rounds 200] [--lr 0.01] [--scale]

papers/001 (footnote 4) builds its baselines on FL-bench; the commit is from June 2023, the month the paper appeared.
The client, the server and the optimizer are theirs, with their defaults: five local epochs, SGD without momentum,
batches of 32. The partition is ours, and so is the model, the paper's LeNet (Table 3) instead of their smaller LeNet
with batch normalization. FL-bench of that time normalizes pixels from 0 to 255 with constants for pixels from 0 to 1;
``--scale`` divides them by 255. Prints the validation accuracy of seen clients before the arrow. About 2 s a round.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkouts
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedloom.data.federated import FederatedDataset
from fedloom.data.inputs import single


def pixels(dataset: FederatedDataset) -> tuple[Tensor, Tensor, list[dict[str, list[int]]]]:
    """Return all training and validation images with pixels from 0 to 255, their labels, and each client's indices."""
    about = dataset.manifest.spec.normalization
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (about.mean, about.std))
    images, labels, where, count = [], [], [], 0
    for entry in dataset.manifest.clients:
        client, lies = dataset.client(entry.id), {}
        for name, split in (("train", client.train), ("test", client.validation)):
            assert split.y is not None
            images.append((255 * (single(split.x) * std + mean)).round())
            labels.append(split.y.long())
            lies[name] = list(range(count, count + len(split.y)))
            count += len(split.y)
        where.append(lies)
    return torch.cat(images), torch.cat(labels), where


def lenet(decoupled: Any) -> Any:
    """Return papers/001's LeNet (Table 3) as an FL-bench model, with a ReLU between ``base`` and ``classifier``."""

    class LeNet(decoupled):  # type: ignore[misc]
        def __init__(self, dataset: str) -> None:
            super().__init__()
            convolutions = [nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU()]
            linear = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84)]
            self.base = nn.Sequential(*convolutions, *linear)
            self.classifier = nn.Linear(84, 10)

    return LeNet


def main() -> None:
    """Train with the checkout's defaults and print its results."""
    arguments = checkouts.parser(__doc__, rounds=200, every=50, lr=0.01)
    arguments.add_argument(
        "--scale", action="store_true", help="scale pixels to 0 to 1, as FL-bench's constants assume"
    )
    given, dataset = checkouts.opened(
        arguments, file="src/server/fedavg.py", checkout="a checkout of FL-bench at 493da92"
    )
    server: Any = importlib.import_module("src.server.fedavg")
    client: Any = importlib.import_module("src.client.fedavg")
    models: Any = importlib.import_module("src.config.models")
    torch.set_num_threads(1)
    images, labels, where = pixels(dataset)
    if given.scale:
        images = images / 255
    seen = [client for client, entry in enumerate(dataset.manifest.clients) if entry.seen]
    partition = {"separation": {"train": seen, "test": seen, "total": len(where)}, "data_indices": where}

    def dealt(*, transform: Any, **_: Any) -> Any:  # normalizes each image once, not on every read
        return TensorDataset(transform(images), labels)

    models.MODEL_DICT["lenet5"] = lenet(models.DecoupledModel)
    client.DATASETS["cifar10"] = dealt
    client.pickle = server.pickle = SimpleNamespace(load=lambda _: partition)
    theirs = server.get_fedavg_argparser().parse_args([])
    theirs.seed, theirs.local_lr = given.seed, given.lr
    theirs.global_epoch = given.rounds + 1
    theirs.join_ratio = 5 / len(where)
    theirs.save_log = theirs.save_fig = theirs.save_metrics = theirs.use_cuda = 0
    with tempfile.TemporaryDirectory() as project:
        folder = Path(project) / "data" / "cifar10"
        folder.mkdir(parents=True)
        (folder / "partition.pkl").touch()
        (folder / "args.json").write_text("{}")
        client.PROJECT_DIR = server.PROJECT_DIR = Path(project)
        federation = server.FedAvgServer(args=theirs)
        for done in range(given.rounds + 1):
            federation.current_epoch = done
            if done % given.every == 0:
                federation.test()
                print(f"after round {done}: {federation.test_results[done + 1]}", flush=True)
            federation.selected_clients = federation.client_sample_stream[done]
            federation.train_one_round()


if __name__ == "__main__":
    main()
