"""The Lightning module of the job."""

import torch
from lightning.pytorch import LightningModule
from torch import nn, optim


class LitNet(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = torch.nn.functional.cross_entropy(self(x), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return {"optimizer": optim.SGD(self.parameters(), lr=0.05, momentum=0.5)}
