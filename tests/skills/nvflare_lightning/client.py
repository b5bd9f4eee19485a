"""A Lightning trainer that NVFlare patches."""

import nvflare.client.lightning as flare
import torchvision
from lightning.pytorch import LightningDataModule, Trainer
from model import LitNet
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

BATCH_SIZE = 50


class Images(LightningDataModule):
    def setup(self, stage):
        self.images = torchvision.datasets.FashionMNIST("/tmp/data", transform=ToTensor())

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=BATCH_SIZE)


def main():
    model = LitNet()
    trainer = Trainer(max_epochs=1)
    flare.patch(trainer)
    while flare.is_running():
        trainer.fit(model, datamodule=Images())


if __name__ == "__main__":
    main()
