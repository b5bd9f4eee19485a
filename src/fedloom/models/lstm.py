"""The character model of LEAF for Shakespeare: stacked LSTMs that predict the next character."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout

FORGET_OFFSET = 1.0
"""Added to the forget gate's argument, as TensorFlow's BasicLSTMCell does: a fresh network remembers. It is a part of
the function, not of θ, so that it also holds for parameters that a hypernetwork has generated."""


class LSTM(FlatModel):
    """An embedding, stacked LSTM layers, and a linear layer on the last state of the last one.

    S. Caldas et al., "LEAF: A benchmark for federated settings", 2018, §A, and the implementation it comes with; the
    clients' model of papers/001, A.3 "Shakespeare dataset". An LSTM layer with input x_t and state (h, c) is, with σ
    the logistic function, ⊙ the product by element, and one bias per gate::

        (i, f, g, o) = W x_t + U h + b
        c ← σ(f + 1) ⊙ c + σ(i) ⊙ tanh(g)
        h ← σ(o) ⊙ tanh(c)

    Parameters
    ----------
    vocabulary
        Number of different tokens, which are the classes too.
    embedding, hidden, layers
        Length of a token's vector, width of a layer, number of layers.
    outputs
        Of the linear layer; None is one for each token.
    """

    def __init__(
        self, vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2, *, outputs: int | None = None
    ) -> None:
        outputs = vocabulary if outputs is None else outputs
        self.hidden = hidden
        self.layers = [f"lstm{i}" for i in range(1, layers + 1)]
        entries: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (vocabulary, embedding))]
        width = embedding
        for name in self.layers:
            entries += [
                (f"{name}.input.weight", (4 * hidden, width)),
                (f"{name}.state.weight", (4 * hidden, hidden)),
                (f"{name}.bias", (4 * hidden,)),
            ]
            width = hidden
        entries += [("fc.weight", (outputs, hidden)), ("fc.bias", (outputs,))]
        self.layout = Layout(tuple(entries))

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """As LEAF's implementation: Glorot's uniform, an LSTM's two matrices taken as one; biases are zero.

        X. Glorot, Y. Bengio, AISTATS 2010, eq. 16. The tokens' vectors alone are drawn wider, with variance 1 as any
        other input has (and as PyTorch's Embedding): with LEAF's, training starts with a longer plateau.
        """
        if name.endswith("bias"):
            return 0.0
        if name == "embedding.weight":
            return math.sqrt(3)
        if name.startswith("lstm"):
            width = dict(self.layout.entries)[name.replace("state", "input")][1]
            fan_in = width + self.hidden
        return math.sqrt(6 / (fan_in + shape[0]))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, tokens]`` of any integer type ``-> [b, hidden]``, the last state of the last layer."""
        h = F.embedding(x.int().t(), parameters["embedding.weight"])  # [tokens, b, embedding]
        for name in self.layers:
            h = self._layer(parameters, name, h)
        return h[-1]

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, tokens] -> [b, outputs]``, by default logits of the next token."""
        return F.linear(self.features(parameters, x), parameters["fc.weight"], parameters["fc.bias"])

    def _layer(self, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        """``[tokens, b, width] -> [tokens, b, hidden]``, the states of one layer.

        Only what depends on the state is left in the loop over time: W x_t is one product for all t.
        """
        bias = parameters[f"{name}.bias"]
        forget = F.pad(bias.new_full((self.hidden,), FORGET_OFFSET), (self.hidden, 2 * self.hidden))
        inputs = F.linear(x, parameters[f"{name}.input.weight"], bias + forget)  # [tokens, b, 4 hidden]
        u = parameters[f"{name}.state.weight"].t()
        h = c = inputs.new_zeros(x.shape[1], self.hidden)
        states = []
        for wx in inputs.unbind(0):
            i, f, g, o = torch.addmm(wx, h, u).chunk(4, 1)
            c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states)
