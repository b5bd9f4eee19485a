"""Image classification by a small vision transformer, with the Trainer."""

import torchvision
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

IMAGES = torchvision.datasets.FashionMNIST("data", train=True, download=True)


def collate(batch):
    return {"pixel_values": [image for image, _ in batch], "labels": [label for _, label in batch]}


def main():
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14,
        num_channels=1, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    arguments = TrainingArguments(
        output_dir="outputs", per_device_train_batch_size=32, learning_rate=1e-3, num_train_epochs=2, max_grad_norm=0.5
    )
    Trainer(model=model, args=arguments, train_dataset=IMAGES, data_collator=collate).train()


main()
