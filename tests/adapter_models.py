"""Small random transformers models in place of pretrained ones, and one with adapters of its own, as factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, IMAGE = 50, 6, (3, 8, 8)
_SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_RATES: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module with the same weights whenever it is made, as pretrained ones are."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make()


def bert(classes: int) -> nn.Module:
    """Return a BERT that classifies sentences; its ``classifier`` is the head."""
    import transformers

    config = transformers.BertConfig(vocab_size=WORDS, num_labels=classes, **_SIZES, **_RATES)
    return _weights(lambda: transformers.BertForSequenceClassification(config))


def vit(classes: int) -> nn.Module:
    """Return a vision transformer; its ``classifier`` is the head."""
    import transformers

    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=classes, **_SIZES, **_RATES)
    return _weights(lambda: transformers.ViTForImageClassification(config))


def gpt() -> nn.Module:
    """Return a GPT-2 that predicts the next token; its output layer is tied to the embedding."""
    import transformers

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=8, **rates)
    return _weights(lambda: transformers.GPT2LMHeadModel(config))


class Sentences(nn.Module):
    """Encoder with peft adapters and a head beside them that peft does not manage."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        import peft

        config = peft.LoraConfig(r=2, target_modules=["query"])
        self.encoder = peft.get_peft_model(encoder(), config)
        self.head = nn.Linear(16, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of the mean over the tokens."""
        logits: Tensor = self.head(self.encoder(input_ids=input_ids).last_hidden_state.mean(1))
        return logits


def encoder() -> nn.Module:
    """Return a BERT without a head."""
    import transformers

    config = transformers.BertConfig(vocab_size=WORDS, **_SIZES, **_RATES)
    return _weights(lambda: transformers.BertModel(config, add_pooling_layer=False))
