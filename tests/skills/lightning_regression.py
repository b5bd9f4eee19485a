"""Regression on a table, with a loss of its own in the training step."""

import pandas as pd
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    table = pd.read_csv("cells.csv")
    y = torch.tensor(table.pop("size").to_numpy(), dtype=torch.float32)
    x = torch.tensor(table.to_numpy(), dtype=torch.float32)
    trainer = pl.Trainer(max_epochs=2)
    trainer.fit(model=Progression(), train_dataloaders=DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
