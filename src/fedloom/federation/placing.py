"""Movement of clients' data and messages to the device that computes on them."""

from __future__ import annotations

import torch

from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import each
from fedloom.messages import Message


def client_to(client: ClientData, device: torch.device) -> ClientData:
    """Return a client's data on a device."""
    if device.type == "cpu":
        return client

    def moved(split: Split) -> Split:
        return Split(each(split.x, lambda x: x.to(device)), None if split.y is None else split.y.to(device))

    return ClientData(client.id, moved(client.train), moved(client.validation), moved(client.test), client.classes)


def message_to(message: Message, device: torch.device) -> Message:
    """Return a message on a device."""
    if all(tensor.device == device for tensor in message.tensors().values()):
        return message
    return type(message)(**{name: tensor.to(device) for name, tensor in message.tensors().items()})
