"""A classifier around a backbone, with hyperparameters."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor


class Backbone(torch.nn.Module):
    def __init__(self, hidden_dim=20):
        super().__init__()
        self.l1, self.l2 = torch.nn.Linear(784, hidden_dim), torch.nn.Linear(hidden_dim, 10)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.view(x.size(0), -1))))


class LitClassifier(LightningModule):
    def __init__(self, backbone=None, learning_rate: float = 0.003):
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = Backbone() if backbone is None else backbone

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    loader = DataLoader(FashionMNIST(".", transform=ToTensor()), batch_size=64, shuffle=True)
    Trainer(max_epochs=2, gradient_clip_val=1.0).fit(LitClassifier(Backbone(hidden_dim=16)), loader)
