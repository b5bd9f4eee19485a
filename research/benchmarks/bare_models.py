"""Users' models, examples for them, and bare PyTorch loops: what a user has without FedLoom, which is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES, BATCH, LR, MOMENTUM = 640, 32, 0.005, 0.9
VOCABULARY, LENGTH = 1000, 32


class BareLeNet(nn.Module):
    """Model of papers/001, Table 3, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(512, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h = F.relu(F.max_pool2d(self.conv1(x), 2))
        h = F.relu(F.max_pool2d(self.conv2(h), 2)).flatten(1)
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(h)))))
        return logits


def resnet18() -> nn.Module:
    """Return torchvision's ResNet18, with batch normalization."""
    from torchvision.models import resnet18 as make

    made: nn.Module = make(num_classes=10)
    return made


def vit() -> nn.Module:
    """Return a small vision transformer of torchvision."""
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 32, "patch_size": 4, "num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 256}
    made: nn.Module = VisionTransformer(**sizes, num_classes=10)
    return made


class BareLSTM(nn.Module):
    """LSTM over a sequence of 80 tokens, with the sizes of LEAF's model for Shakespeare, which predicts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(80, 8), nn.Linear(256, 80)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the token after the last."""
        hidden, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.head(hidden[:, -1])
        return logits


def bert() -> nn.Module:
    """Return a tiny BERT of transformers with LoRA adapters of peft, which are trained with the classifier."""
    import peft
    import transformers

    sizes: Any = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **sizes)
    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    made: nn.Module = peft.get_peft_model(transformers.BertForSequenceClassification(config), adapters)
    return made


def unet() -> nn.Module:
    """Return a small U-Net of MONAI for two classes of a pixel."""
    from monai.networks.nets.unet import UNet

    made: nn.Module = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(16, 32, 64), strides=(2, 2))
    return made


def mlp() -> nn.Module:
    """Return a network of three layers that predicts one number from 32 features."""
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


@dataclass(frozen=True)
class Model:
    """Model and its problem.

    Attributes
    ----------
    shape
        Shape of an example; of named integers, shape and highest value + 1 by name.
    outputs, target_shape
        Number of outputs, and shape of a target.
    steps
        Steps of a visit.
    """

    make: Callable[[], nn.Module]
    task: Literal["classification", "regression", "segmentation"]
    shape: tuple[int, ...] | Mapping[str, tuple[tuple[int, ...], int]]
    kind: Literal["pixels", "features", "integers"]
    outputs: int
    steps: int
    target_shape: tuple[int, ...] = ()

    def examples(self) -> tuple[Any, Tensor]:
        """Return random examples, ``[n, ...]`` or such tensors by name, and targets."""
        random = torch.Generator().manual_seed(0)
        x: Any
        if isinstance(self.shape, Mapping):
            x = {
                name: torch.randint(high, (EXAMPLES, *shape), generator=random)
                for name, (shape, high) in self.shape.items()
            }
        else:
            x = torch.randn(EXAMPLES, *self.shape, generator=random)
        shape = (EXAMPLES, *self.target_shape)
        if self.task == "regression":
            return x, torch.randn(shape, generator=random)
        return x, torch.randint(self.outputs, shape, generator=random)


_WORDS = {"input_ids": ((LENGTH,), VOCABULARY), "attention_mask": ((LENGTH,), 2)}
MODELS = {
    "LeNet": Model(BareLeNet, "classification", (1, 28, 28), "pixels", 10, 20),
    "ResNet18": Model(resnet18, "classification", (3, 32, 32), "pixels", 10, 10),
    "ViT": Model(vit, "classification", (3, 32, 32), "pixels", 10, 10),
    "LSTM": Model(BareLSTM, "classification", {"x": ((80,), 80)}, "integers", 80, 10),
    "BERT, LoRA": Model(bert, "classification", _WORDS, "integers", 2, 20),
    "U-Net": Model(unet, "segmentation", (1, 32, 32), "pixels", 2, 10, (32, 32)),
    "MLP": Model(mlp, "regression", (32,), "features", 1, 40),
}
_LOSSES = {
    "classification": F.cross_entropy,
    "regression": lambda predicted, y: F.mse_loss(predicted[:, 0], y),
    "segmentation": F.cross_entropy,
}


def bare_loop(model: Model, index: Callable[[], Any]) -> Callable[[], Tensor]:
    """Return a function that trains torch's module by ``torch.optim.SGD``, and returns its parameters ``[d]``.

    ``index()`` gives the batches of a visit, as indices of examples.
    """
    net, loss, (x, y) = model.make().train(), _LOSSES[model.task], model.examples()
    trained = [p for p in net.parameters() if p.requires_grad]

    def visit() -> Tensor:
        optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
        for batch in index():
            optimizer.zero_grad()
            outputs = net(**{name: t[batch] for name, t in x.items()}) if isinstance(x, dict) else net(x[batch])
            loss(getattr(outputs, "logits", outputs), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in trained])

    return visit
