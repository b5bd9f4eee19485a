"""An app whose settings are constants of the file, with a partitioner by labels and a learning-rate schedule."""

import flwr_datasets
import torch
from flwr_datasets.partitioner import DirichletPartitioner
from torch import nn

LEARNING_RATE, WIDTH = 0.05, 24
BATCH = 64


def make_model(width: int = 24) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))


def client(partition_id: int):
    partitioner = DirichletPartitioner(num_partitions=5, partition_by="label", alpha=0.3)
    data = flwr_datasets.FederatedDataset(dataset="fashion_mnist", partitioners={"train": partitioner})
    loader = torch.utils.data.DataLoader(data.load_partition(partition_id), batch_size=BATCH)
    rate = 0.05
    net = make_model()
    net = net.to("cpu")
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(net(batch["image"]), batch["label"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
        scheduler.step()
        print(epoch)
