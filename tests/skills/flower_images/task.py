"""Model, data and loops of an app, as Flower's quickstart lays them out."""

import torch
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import IidPartitioner
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor

CLASSES = 10
to_input = Compose([ToTensor(), Normalize((0.5,), (0.5,))])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def load_data(partition_id, num_partitions, batch_size):
    partitioner = IidPartitioner(num_partitions=num_partitions)
    federated = FederatedDataset(dataset="zalando-datasets/fashion_mnist", partitioners={"train": partitioner})
    part = federated.load_partition(partition_id).train_test_split(test_size=0.2)
    part = part.with_transform(lambda batch: {**batch, "image": [to_input(each) for each in batch["image"]]})
    return DataLoader(part["train"], batch_size=batch_size, shuffle=True), DataLoader(part["test"], batch_size=128)


def train(net, loader, epochs, lr, device):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch["image"].to(device)), batch["label"].to(device)).backward()
            optimizer.step()
