"""A site's script on a table of its own, with NVFlare's decorators; settings come from the command line."""

import argparse

import nvflare.client as flare
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--hidden-dim", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class Scorer(nn.Module):
    def __init__(self, inputs: int, hidden_dim: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, 2))

    def forward(self, x):
        return self.layers(x)


def main():
    frame = pd.read_csv("cells.csv")
    labels = frame.pop("kind")
    inputs = torch.tensor(frame.to_numpy(), dtype=torch.float32)
    model = Scorer(inputs=4, hidden_dim=args.hidden_dim)
    loader = DataLoader(TensorDataset(inputs, torch.tensor(labels)), batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    flare.init()
    for epoch in range(1, args.epochs + 1):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        flare.log("epoch", epoch)


main()
