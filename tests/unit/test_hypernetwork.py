"""The hypernetwork: its reverse pass against autograd, and equal bits in any cohort (papers/001, Table 5)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.hypernetwork import COLUMNS, ROWS, Hypernetwork, _larger


def made(
    size_in: int = 4, d: int = 11, seed: int = 0, dtype: torch.dtype = torch.float64, **options: object
) -> tuple[Hypernetwork, dict[str, Tensor]]:
    network = Hypernetwork(size_in, d, **options)  # type: ignore[arg-type]
    return network, network.layout.split(network.init(torch.Generator().manual_seed(seed), dtype))


def plain(p: dict[str, Tensor], v: Tensor, output_relu: bool = True) -> Tensor:
    layers = len(p) // 2
    for i in range(1, layers + 1):
        v = v @ p[f"fc{i}.weight"].T + p[f"fc{i}.bias"]
        if i < layers - 1 or (i == layers - 1 and output_relu):
            v = F.relu(v)
    return v


@pytest.mark.parametrize(("size", "hidden"), [("S", 1), ("M", 3), ("L", 5)])
def test_layers_match_the_paper(size: str, hidden: int) -> None:
    network, _ = made(26, 85_822 // 100, size=size)
    weights = [shape for name, shape in network.layout.entries if name.endswith("weight")]
    assert weights == [(100, 26), *[(100, 100)] * hidden, (858, 100)]
    assert [name for name, _ in network.layout.entries[-2:]] == [f"fc{hidden + 2}.weight", f"fc{hidden + 2}.bias"]


def test_the_m_hypernetwork_of_a_lenet_has_the_size_of_table_5() -> None:
    network = Hypernetwork(26, 85_822)
    assert network.layout.size == (26 * 100 + 100) + 3 * (100 * 100 + 100) + (100 * 85_822 + 85_822)


@pytest.mark.parametrize("c", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("output_relu", [True, False])
@pytest.mark.parametrize("size", ["S", "M"])
def test_the_reverse_pass_equals_autograds(c: int, output_relu: bool, size: str) -> None:
    network, p = made(size=size, output_relu=output_relu)
    random = torch.Generator().manual_seed(c)
    v = torch.randn(c, 4, generator=random, dtype=torch.float64)
    delta = torch.randn(c, 11, generator=random, dtype=torch.float64)
    weights = torch.rand(c, generator=random, dtype=torch.float64)
    weights[::3] = 0  # clients that did not answer

    leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
    inputs = v.clone().requires_grad_()
    expected = plain(leaves, inputs, output_relu)
    (d_v,) = torch.autograd.grad((expected * delta).sum(), [inputs], retain_graph=True)
    d_eta = torch.autograd.grad((expected * delta * weights[:, None]).sum(), list(leaves.values()))

    theta, pullback = network.vjp(p, v)
    torch.testing.assert_close(theta, expected.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(network(p, v), theta, rtol=0, atol=0)
    back = pullback(delta, weights)
    torch.testing.assert_close(back.d_v, d_v, rtol=0, atol=1e-14)
    found = back.d_eta_h()
    assert list(found) == list(p)
    for (name, value), truth in zip(found.items(), d_eta, strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_clients_model_has_the_same_bits_in_any_cohort(threads: int) -> None:
    """In float32, in every cohort size from 1 to 17, at every position."""
    network, p = made(26, 2003, dtype=torch.float32)
    random = torch.Generator().manual_seed(2)
    mine, others = torch.randn(1, 26, generator=random), torch.randn(17, 26, generator=random)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = network(p, mine)[0]
        for c in range(1, 18):
            for position in range(c):
                cohort = others[:c].clone()
                cohort[position] = mine[0]
                assert torch.equal(network(p, cohort)[position], alone), f"row {position} of {c}"
            theta, _ = network.vjp(p, cohort)  # the client in question is the last row
            assert torch.equal(theta[c - 1], alone), f"training, row {c - 1} of {c}"
    finally:
        torch.set_num_threads(before)


def test_a_clients_feedback_has_the_same_bits_in_any_cohort() -> None:
    network, p = made(26, 2003, dtype=torch.float32)
    random = torch.Generator().manual_seed(3)
    v, delta = torch.randn(17, 26, generator=random), torch.randn(17, 2003, generator=random)
    _, pullback = network.vjp(p, v[:1])
    alone = pullback(delta[:1], torch.ones(1)).d_v[0]
    for c in range(2, 18):
        _, pullback = network.vjp(p, v[:c])
        assert torch.equal(pullback(delta[:c], torch.ones(c)).d_v[0], alone), f"cohort of {c}"


def test_a_model_has_the_same_bits_with_several_matrix_products() -> None:
    network, p = made(d=2 * COLUMNS + 1, dtype=torch.float32)
    v = torch.randn(85, 4, generator=torch.Generator().manual_seed(1))
    theta = network(p, v)
    assert torch.equal(theta, torch.cat([network(p, row[None]) for row in v]))
    assert torch.equal(theta, network.vjp(p, v)[0])
    torch.testing.assert_close(theta.double(), plain({k: w.double() for k, w in p.items()}, v.double()))


def test_rows_whose_bits_differ_from_a_tiles_are_computed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    def moody(b: Tensor, h: Tensor, w: Tensor) -> Tensor:
        products = h[:, :, None] * w
        return b + (products if len(h) != 32 else products.flip(1)).sum(1)

    monkeypatch.setattr(torch, "addmm", moody)
    assert _larger.__wrapped__(100, 50, 1) == tuple(rows for rows in ROWS if rows != 32)
