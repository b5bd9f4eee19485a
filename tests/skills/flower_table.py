"""A client of an older API, with a table: binary classes by one sigmoid."""

import flwr as fl
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, inputs: int = 30):
        super().__init__()
        self.hidden = nn.Linear(inputs, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, x):
        return torch.sigmoid(self.output(torch.relu(self.hidden(x))))


def train(model, loader, num_epochs=1):
    criterion = nn.BCELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.005)
    for _epoch in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y[:, None].float()).backward()
            optimizer.step()


class Client(fl.client.NumPyClient):
    def __init__(self):
        x, y = load_breast_cancer(return_X_y=True)
        data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        self.model, self.loader = Classifier(), DataLoader(data, batch_size=16, shuffle=True)

    def fit(self, parameters, config):
        train(self.model, self.loader)
        return [value.numpy() for value in self.model.state_dict().values()], len(self.loader), {}
