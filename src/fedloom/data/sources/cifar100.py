"""CIFAR-100: photographs in a hundred classes (Krizhevsky 2009), in its official binary files.

A record has two label bytes, the coarse class (of 20) and the fine class (of 100); the fine class is the label.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.data.sources.base import RawDataset, Source, SourceFile
from fedloom.data.sources.cifar10 import SHAPE, pool
from fedloom.data.sources.fetchers import DownloadArchive

# fmt: off
FINE = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
    "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
    "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
    "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table",
    "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)
# fmt: on


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the two binary files."""
    train, test = (pool(contents, [name], 2, len(FINE)) for name in ("train.bin", "test.bin"))
    return RawDataset(train, test)


CIFAR100 = Source(
    name="cifar100",
    title="CIFAR-100",
    class_names=FINE,
    input_shape=SHAPE,
    licence="none stated (Alex Krizhevsky asks to cite his report of 2009)",
    files=(
        SourceFile("train.bin", 153700000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        SourceFile("test.bin", 30740000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    fetchers=(DownloadArchive("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "cifar-100-binary"),),
    read=read,
)
