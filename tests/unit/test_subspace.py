"""Random subspaces: P is orthonormal, has the stated distribution, is the same in every process, and is fast."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from facts import refusing
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.errors import ExperimentError
from fedloom.models.networks import MLP, LeNet
from fedloom.models.subspace import Subspace, SubspaceSettings

MODEL = MLP((1, 4, 4), [7], 3)
D = MODEL.layout.size  # 143


def drawn(size: int = 11, seed: int = 0) -> Subspace:
    return Subspace(MODEL, size, seed, torch.float64)


def dense(subspace: Subspace) -> Tensor:
    """Return P ``[d, k]`` by its action on the unit vectors."""
    unit = torch.eye(subspace.size, dtype=torch.float64)
    return (subspace.expand(unit) - subspace.origin).T


@pytest.mark.parametrize("size", [1, 2, 11, 100, D])
def test_columns_are_orthonormal(size: int) -> None:
    subspace = drawn(size)
    p = dense(subspace)
    torch.testing.assert_close(p.T @ p, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-14)
    sizes = (p != 0).sum(0)
    assert int(sizes.max() - sizes.min()) <= 1
    assert bool(((p != 0).sum(1) == 1).all())
    v = torch.randn(size, dtype=torch.float64)
    moved = subspace.expand(v) - subspace.origin
    torch.testing.assert_close(moved, p @ v, rtol=0, atol=1e-14)
    torch.testing.assert_close(moved.norm(), v.norm(), rtol=1e-14, atol=0)


def test_the_projection_is_the_transpose_and_the_derivative() -> None:
    subspace = drawn()
    change, v = torch.randn(3, D, dtype=torch.float64), torch.randn(11, dtype=torch.float64, requires_grad=True)
    projected = subspace.project(change)
    torch.testing.assert_close(projected, change @ dense(subspace), rtol=0, atol=1e-13)
    (gradient,) = torch.autograd.grad((subspace.expand(v) * change[0]).sum(), [v])
    torch.testing.assert_close(gradient, projected[0], rtol=0, atol=1e-13)
    assert torch.equal(subspace.project(change[1:2])[0], projected[1])  # for any other clients in the batch


def test_stacked_clients_expand_as_one_does() -> None:
    subspace, v = drawn(), torch.randn(4, 11, dtype=torch.float64)
    one_by_one = torch.stack([subspace.expand(row) for row in v])
    assert torch.equal(subspace.expand(v), one_by_one)
    assert torch.equal(vmap(subspace.expand)(v), one_by_one)


@pytest.mark.slow
def test_over_draws_the_projection_is_unbiased_and_signs_are_fair() -> None:
    """Check E[P Pᵀ] = (k/d) I, so that E‖Pᵀ g‖² = (k/d) ‖g‖²."""
    draws, k = 4000, 11
    ps = [dense(drawn(k, seed)) for seed in range(draws)]
    mean = sum(p @ p.T for p in ps) / draws
    expected = k / D * torch.eye(D, dtype=torch.float64)
    largest = k / D  # an entry of P Pᵀ is ±1/n off the diagonal with probability about 1/k, n = d/k
    assert float((mean - expected).abs().max()) < 6 * largest / (k * draws) ** 0.5
    signs = sum(p.sum() * (D / k) ** 0.5 for p in ps) / (draws * D)
    assert abs(float(signs)) < 5 / (draws * D) ** 0.5


@pytest.mark.slow
def test_a_seed_determines_the_subspace_in_every_process() -> None:
    one, other = drawn(seed=3), drawn(seed=4)
    assert not torch.equal(one.origin, other.origin)
    assert not torch.equal(one.groups, other.groups)
    code = (
        "import hashlib, torch; from fedloom.models.networks import MLP; from fedloom.models.subspace import Subspace\n"
        "s = Subspace(MLP((1, 4, 4), [7], 3), 11, 3, torch.float64)\n"
        "print(hashlib.sha256(b''.join(t.numpy().tobytes() for t in (s.origin, s.groups, s.entries))).hexdigest())"
    )
    texts = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    here: dict[str, object] = {}
    exec(code.replace("print(", "found = ("), here)
    assert texts == {f"{here['found']}\n".encode()}


def test_the_origin_is_the_models_own_initialization() -> None:
    """Every entry lies within the bound of its layer's initialization."""
    bounds = {"fc1": 1 / 4, "fc2": 1 / 7**0.5}
    for name, part in MODEL.layout.split(drawn().origin).items():
        assert 0.5 * bounds[name[:3]] < float(part.abs().max()) <= bounds[name[:3]]


class Outputs(TorchDispatchMode):
    """Counter of the numbers that all operations within read and return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.numbers += sum(x.numel() for x in (*tree_leaves(args), *tree_leaves(found)) if isinstance(x, Tensor))
        return found


def test_expansion_and_projection_take_linear_time() -> None:
    """Both make a few copies of θ, where a dense P of this size would have 86 million entries."""
    model = LeNet((1, 28, 28), 10)
    subspace = Subspace(model, 1000, 0)
    v, g = torch.randn(1000, requires_grad=True), torch.randn(model.layout.size)
    with Outputs() as outputs:
        torch.autograd.grad((subspace.expand(v) * g).sum(), [v])
    assert outputs.numbers < 25 * model.layout.size


def test_a_subspace_larger_than_the_model_is_rejected() -> None:
    assert SubspaceSettings().dimension(MODEL) == D
    assert SubspaceSettings().dimension(LeNet((1, 28, 28), 10)) == 500
    SubspaceSettings().check(MODEL, "algorithm.subspace")
    SubspaceSettings(size=D).check(MODEL, "algorithm.subspace")
    with refusing(ExperimentError, "algorithm.subspace.size: ", D, D + 1):
        SubspaceSettings(size=D + 1).check(MODEL, "algorithm.subspace")
