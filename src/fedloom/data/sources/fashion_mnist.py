"""Fashion-MNIST: articles of clothing, in the format of MNIST (Xiao, Rasul and Vollgraf 2017)."""

from __future__ import annotations

from pathlib import Path

from fedloom.data.sources.base import Source, SourceFile
from fedloom.data.sources.fetchers import Copy, DebianPackage, Download
from fedloom.data.sources.mnist import read

FASHION_MNIST = Source(
    name="fashion-mnist",
    title="Fashion-MNIST",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    input_shape=(1, 28, 28),
    licence="MIT (Zalando SE)",
    files=(
        SourceFile(
            "train-images-idx3-ubyte", 47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
        ),
        SourceFile(
            "train-labels-idx1-ubyte", 60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
        ),
        SourceFile(
            "t10k-images-idx3-ubyte", 7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
        ),
        SourceFile("t10k-labels-idx1-ubyte", 10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    fetchers=(
        Copy(Path("/usr/share/datasets/fashion-mnist")),
        Download("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
        DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    read=read,
)
