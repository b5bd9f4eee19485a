"""The module. Replace it by your own."""

from torch import nn


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network for signals ``[b, channels, length]``, with one output per class."""
    channels, length = input_shape
    return nn.Sequential(
        nn.Conv1d(channels, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8 * (length // 2), classes),
    )
