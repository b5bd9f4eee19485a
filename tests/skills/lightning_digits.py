"""A module that logs with self.log and takes its sizes as arguments, on scikit-learn's digits."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self, width, lr=0.05, weight_decay=1e-4):
        super().__init__()
        self.lr, self.weight_decay = lr, weight_decay
        self.net = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.log("accuracy", (outputs.argmax(1) == y).float().mean())
        return self.criterion(outputs, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)


x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
trainer = L.Trainer(max_epochs=2, accumulate_grad_batches=2)
trainer.fit(Digits(width=16), DataLoader(dataset, batch_size=16, shuffle=True))
