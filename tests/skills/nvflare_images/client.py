"""The training script of a job, with NVFlare's client API."""

import argparse

import nvflare.client as flare
import torch
import torchvision
from model import SmallNetwork
from torch import nn
from torch.optim import SGD
from torchvision.transforms import Compose, Normalize, ToTensor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    arguments = parser.parse_args()
    epochs, lr = arguments.epochs, 0.02
    model = SmallNetwork()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    criterion = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    transform = Compose([ToTensor(), Normalize((0.5,), (0.5,))])
    train_set = torchvision.datasets.FashionMNIST("/tmp/data", train=True, download=True, transform=transform)
    loader = torch.utils.data.DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    flare.init()
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        model.to(device)
        for _epoch in range(arguments.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                criterion(model(images.to(device)), labels.to(device)).backward()
                optimizer.step()
        flare.send(flare.FLModel(params=model.cpu().state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": epochs * lr}))


if __name__ == "__main__":
    main()
