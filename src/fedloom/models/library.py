"""Networks of well-kept libraries, made for the inputs and outputs of a problem; ``models.registry`` has their keys."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.errors import ExperimentError

SMALL = 64
"""Side in pixels below which ResNet18 begins with a 3x3 convolution of stride 1 and no pooling."""


def imported(model: str, package: str, extra: str) -> Any:
    """Import the package that has a network.

    Raise ExperimentError if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ExperimentError(
            f"model.name: {model} is a network of {package.partition('.')[0]}, which is not installed",
            hint=f"pip install 'fedloom[{extra}]'",
            key="model.name",
            found=model,
        ) from error


def resnet18(input_shape: tuple[int, ...], outputs: int, norm: Literal["batch", "group"]) -> nn.Module:
    """Return torchvision's ResNet18 for any number of channels.

    Group normalization has 32 groups (Y. Wu, K. He, ECCV 2018).
    """
    models = imported("resnet18", "torchvision.models", "vision")
    module: nn.Module = models.resnet18(num_classes=outputs, norm_layer=None if norm == "batch" else _groups)
    channels, *sides = input_shape
    if min(sides) < SMALL:
        module.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        module.maxpool = nn.Identity()
    elif channels != 3:
        module.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    assert isinstance(module.conv1, nn.Conv2d)
    nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision draws it
    return module


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


def vit(
    input_shape: tuple[int, ...], outputs: int, *, patch: int, width: int, layers: int, heads: int, dropout: float
) -> nn.Module:
    """Return torchvision's vision transformer for any number of channels.

    Raise ValueError if the images are not square, or their side is no multiple of the patch's, or heads do not divide
    the width.
    """
    channels, height, side = input_shape
    if height != side or side % patch:
        raise ValueError(f"images must be square, with a side that patch divides (got {height}x{side}, patch {patch})")
    check_heads(width, heads)
    models = imported("vit", "torchvision.models", "vision")
    module: nn.Module = models.VisionTransformer(
        image_size=side,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
        dropout=dropout,
        num_classes=outputs,
    )
    if channels != 3:
        module.conv_proj = nn.Conv2d(channels, width, patch, patch)
        nn.init.trunc_normal_(module.conv_proj.weight, std=(channels * patch**2) ** -0.5)  # as torchvision draws it
        nn.init.zeros_(module.conv_proj.bias)  # type: ignore[arg-type]
    return module


def unet(input_shape: tuple[int, ...], outputs: int, channels: Sequence[int]) -> nn.Module:
    """Return MONAI's U-Net with instance normalization, without residual units.

    Raise ValueError if a side of the images cannot be halved as often as there are levels below the first.
    """
    factor = 2 ** (len(channels) - 1)
    if any(side % factor or side < 2 * factor for side in input_shape[1:]):
        sides = "x".join(map(str, input_shape[1:]))
        raise ValueError(f"sides of images must be multiples of {factor}, and at least {2 * factor} (got {sides})")
    nets = imported("unet", "monai.networks.nets", "unet")
    module: nn.Module = nets.UNet(
        spatial_dims=2,
        in_channels=input_shape[0],
        out_channels=outputs,
        channels=tuple(channels),
        strides=(2,) * (len(channels) - 1),
    )
    return module


class TokenTransformer(nn.Module):
    """PyTorch's transformer encoder on tokens, with learned positions.

    Parameters
    ----------
    vocabulary, length
        Number of tokens, and of places.
    next_token
        True: outputs ``[b, T, K]`` of each place, which sees only itself and the places before it. False: outputs
        ``[b, K]`` of the mean over the places.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        outputs: int,
        *,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        next_token: bool,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.next_token = next_token
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.fc = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``[b, T] -> [b, T, K]`` or ``[b, K]``."""
        h = self.embedding(x.long()) + self.positions
        if not self.next_token:
            return self.fc(self.encoder(h).mean(1))  # type: ignore[no-any-return]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.fc(self.encoder(h, mask=later))  # type: ignore[no-any-return]


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError unless attention heads divide the width."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads (got {width} and {heads})")
