"""Spearman's correlation against scipy, and the analysis of papers/001 §4 on cases with known answers."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.evaluation.descriptors import (
    CURVE,
    MAPS,
    average_ranks,
    curve,
    descriptor_correlation,
    descriptor_document,
    principal_axes,
    project_descriptors,
    spearman,
)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e3, 1e3)), min_size=2, max_size=40))
def test_ranks_and_spearman_against_scipy(pairs: list[tuple[int, float]]) -> None:
    x, y = np.array([p[0] for p in pairs], dtype=float), np.array([p[1] for p in pairs])
    np.testing.assert_array_equal(average_ranks(torch.tensor(x)).numpy(), stats.rankdata(x))
    found = float(spearman(torch.tensor(x), torch.tensor(y)))
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_spearman_is_batched() -> None:
    x, y = torch.rand(3, 4, 9), torch.rand(3, 4, 9)
    found = spearman(x, y)
    assert found.shape == (3, 4)
    assert float(found[2, 1]) == pytest.approx(float(spearman(x[2, 1], y[2, 1])))


def mixes(n: int, classes: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).dirichlet([0.1] * classes, n))


def test_correlation_against_scipy_over_all_clients_and_itself() -> None:
    pi = mixes(30, 10)
    v = torch.randn(30, 7, generator=torch.Generator().manual_seed(1))
    unseen = torch.arange(30) >= 25
    found = descriptor_correlation(v, pi, unseen)
    expected = []
    for i in range(25, 30):
        d_v = np.linalg.norm((v - v[i]).double().numpy(), axis=1)  # n entries: j = i is one of them, as in the paper
        d_pi = np.linalg.norm((pi - pi[i]).numpy(), axis=1).round(6)
        expected.append(stats.spearmanr(d_v, d_pi).statistic)
    np.testing.assert_allclose(found.per_client.numpy(), expected, atol=1e-12)
    assert found.rows.tolist() == [25, 26, 27, 28, 29]
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.std == pytest.approx(np.std(expected))
    assert found.excluded == 0


def test_descriptors_equal_to_the_class_mix_correlate_perfectly() -> None:
    pi = mixes(40, 5)
    unseen = torch.arange(40) % 4 == 0
    assert descriptor_correlation(3 * pi - 1, pi, unseen).mean == pytest.approx(1.0)


def test_equal_distances_of_class_mixes_are_ties_for_any_class_order() -> None:
    # two clients' worth of 3/10 and 7/10 in every pair of classes: |π_i - π_j| takes few values, in many orders
    pi = torch.zeros(90, 10, dtype=torch.float64)
    for row, (a, b) in enumerate((a, b) for a in range(10) for b in range(10) if a != b):
        pi[row, a], pi[row, b] = 3 / 10, 7 / 10
    shuffled = pi[:, torch.randperm(10, generator=torch.Generator().manual_seed(0))]
    v = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    unseen = torch.ones(90, dtype=torch.bool)
    one, other = descriptor_correlation(v, pi, unseen), descriptor_correlation(v, shuffled, unseen)
    np.testing.assert_allclose(one.per_client, other.per_client, rtol=0, atol=1e-12)
    single = descriptor_correlation(v, pi.float(), unseen)
    np.testing.assert_allclose(one.per_client, single.per_client, rtol=0, atol=1e-12)


def test_constant_vectors_are_excluded_and_counted() -> None:
    pi, unseen = mixes(10, 3), torch.arange(10) >= 6
    found = descriptor_correlation(torch.zeros(10, 4), pi, unseen)
    assert (found.mean, found.std, found.excluded, len(found.per_client)) == (None, None, 4, 0)
    assert found.as_json() == {"mean": None, "std": None, "clients": 0, "excluded": 4}
    nobody = descriptor_correlation(torch.randn(10, 4), pi, torch.zeros(10, dtype=torch.bool))
    assert (nobody.mean, nobody.excluded) == (None, 0)
    alone = descriptor_correlation(torch.randn(1, 4), pi[:1], torch.ones(1, dtype=torch.bool))
    assert (alone.mean, alone.excluded) == (None, 1)


def test_absent_clients_are_in_no_vector() -> None:
    pi, v = mixes(12, 4), torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    unseen, present = torch.arange(12) >= 8, torch.ones(12, dtype=torch.bool)
    present[[2, 9]] = False
    found = descriptor_correlation(v.masked_fill(~present[:, None], 0), pi, unseen, present)
    assert found.rows.tolist() == [8, 10, 11]
    without = descriptor_correlation(v[present], pi[present], unseen[present])
    assert found.per_client.tolist() == without.per_client.tolist()


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_a_map_keeps_the_variance_of_numpys_covariance(n: int, dim: int, seed: int) -> None:
    v = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    xy, explained = project_descriptors(v, principal_axes(v))
    assert xy.shape == (n, 2)
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(v.T.numpy(), ddof=0).reshape(dim, dim)))[::-1] if n > 1 else [0.0]
    expected = [eigenvalues[k] if k < len(eigenvalues) else 0.0 for k in range(2)]
    np.testing.assert_allclose(xy.var(0, correction=0).numpy(), expected, atol=1e-10)
    if n > 1:
        np.testing.assert_allclose(explained.numpy(), np.array(expected) / sum(eigenvalues), atol=1e-10)


def test_a_map_has_a_fixed_sign_and_survives_degenerate_input() -> None:
    v = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.1], [0.5, 1.0, -3.0]])
    xy, _ = project_descriptors(v, principal_axes(v))
    moved, _ = project_descriptors(v + 100, principal_axes(v + 100))
    np.testing.assert_allclose(xy, moved, atol=1e-4, rtol=0)
    mirrored, _ = project_descriptors(-v, principal_axes(-v))  # the axes are the same, the points are mirrored
    np.testing.assert_allclose(mirrored, -xy, atol=1e-12)
    for degenerate in (torch.zeros(0, 3), torch.ones(4, 3), torch.ones(1, 3)):
        xy, explained = project_descriptors(degenerate, principal_axes(degenerate))
        assert not xy.any()
        assert not explained.any()


def documents(rounds: Sequence[int], v: Sequence[torch.Tensor], **more: Any) -> dict[str, Any]:
    """Return the document after evaluations of ``rounds``, in that order, with these descriptors."""
    n = len(v[0])
    pi, seen, ids = mixes(n, 3), torch.arange(n) < n - 2, [f"client-{i:04d}" for i in range(n)]
    document = None
    for round, each in zip(rounds, v, strict=True):
        correlation = descriptor_correlation(each, pi, ~seen)
        document = descriptor_document(document, round, correlation, v=each, pi=pi, clients=ids, seen=seen, **more)
        document = json.loads(json.dumps(document, allow_nan=False))  # as read back from its file
    assert document is not None
    return document


def some(count: int, n: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 4, generator=generator) for _ in range(count)]


def test_the_document_grows_by_round_and_drops_rewritten_rounds() -> None:
    v = some(3)
    document = documents((0, 50, 100, 50), [v[0], v[1], v[2], v[1]])
    assert document == documents((0, 50), v[:2])
    assert document["round"] == [0, 50]
    assert document["clients"]["class"] == mixes(8, 3).argmax(1).tolist()
    assert document["clients"]["seen"] == [True] * 6 + [False] * 2
    assert document["clients"]["ids"][7] == "client-0007"


def test_all_maps_share_the_axes_of_the_last() -> None:
    v = some(3)
    document = documents((0, 50, 100), v)
    centred = (v[2] - v[2].mean(0)).double().numpy()
    axes = np.linalg.svd(centred, full_matrices=False)[2][:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    for each, kept in zip(v, document["maps"], strict=True):
        values = each.double().numpy() - each.double().numpy().mean(0)
        np.testing.assert_allclose(kept["xy"], values @ axes.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kept["explained"], ((values @ axes.T) ** 2).sum(0) / (values**2).sum(), rtol=1e-6)
        raw = np.frombuffer(base64.b64decode(kept["descriptors"]), dtype="<f4").reshape(8, 4)
        np.testing.assert_array_equal(raw, each.numpy())


@pytest.mark.parametrize("evaluations", [1, 2, 5, 6, 9, 10, 17, 18, 40])
def test_the_first_the_last_and_some_maps_between_are_kept(evaluations: int) -> None:
    rounds = [10 * i for i in range(evaluations)]
    kept = [each["round"] for each in documents(rounds, some(evaluations, 4))["maps"]]
    assert len(kept) <= MAPS
    assert len(kept) >= min(evaluations, MAPS // 2 + 2)
    assert kept[0] == 0
    assert kept[-1] == rounds[-1]
    assert len({b - a for a, b in itertools.pairwise(kept[:-1])}) <= 1


def test_a_resumed_run_keeps_the_maps_of_an_uninterrupted_one() -> None:
    v, rounds = some(13, 4), list(range(13))
    stopped = [*rounds[:10], *rounds[4:]]  # back at round 9 to the checkpoint before round 4
    assert documents(stopped, [v[r] for r in stopped]) == documents(rounds, v)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, *(pytest.param(every, marks=pytest.mark.exhaustive) for every in (7, 100))])
def test_the_curve_of_a_long_run_is_thinned_evenly(every: int) -> None:
    def grown(evaluated: Iterable[int]) -> list[int]:
        rounds: list[int] = []
        for new in evaluated:
            rounds = [*(rounds[i] for i in curve(rounds, new)), new]
            assert len(rounds) <= CURVE + 1
        return rounds

    whole = [every * i for i in range(9000)]
    assert grown(whole[:CURVE]) == whole[:CURVE]
    rounds = grown(whole)
    assert len(rounds) > CURVE // 2
    assert rounds[-1] == whole[-1]
    assert len({b - a for a, b in itertools.pairwise(rounds[:-1])}) == 1
    back = [*whole[:4100], *whole[3900:]]  # to a checkpoint from before rounds were thinned again
    assert grown(back) == rounds


def test_absent_clients_are_on_no_map() -> None:
    v = some(2)
    present = torch.tensor([True, False, *[True] * 6])
    last = documents((0, 1), v, present=present)["maps"][-1]
    assert [point is None for point in last["xy"]] == (~present).tolist()
    expected, _ = project_descriptors(v[1][present], principal_axes(v[1][present]))
    np.testing.assert_allclose([point for point in last["xy"] if point], expected, rtol=1e-4, atol=1e-5)
