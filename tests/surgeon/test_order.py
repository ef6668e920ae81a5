"""Structured optimal brain surgeon against dense least-squares fits done from scratch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.engine.gram import Gram
from shearling.errors import ModelError
from shearling.surgeon.measure import Curvature
from shearling.surgeon.order import PANEL, TOGETHER, Order, _bounded, _State, order

SHAPES = {"filters": (12, 1), "heads": (5, 3), "one unit": (1, 4), "wide heads": (3, 70)}
shapes = pytest.mark.parametrize(("units", "width"), SHAPES.values(), ids=SHAPES)


def curvature(units: int, width: int, out: int = 4, seed: int = 0, *, identity: bool = False) -> Curvature:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n = units * width
    h = draw(2 * n, n) @ (torch.eye(n, dtype=torch.float64) + 0.3 * draw(n, n))
    g = draw(3 * out, out)
    G = torch.eye(out, dtype=torch.float64) if identity else g.T @ g / len(g)
    return Curvature(Gram([h.T @ h / len(h)]), Gram([G]), draw(out, n), width)


def residual(c: Curvature, removed: Tensor, damp: float) -> float:
    """tr(G dW (A + damp) dW^T) of the best weights with the removed units' columns at zero, by `lstsq`.

    Written as min || (W' - W) X ||^2 weighted by G, with X a square root of the damped A: an ordinary least-squares
    problem, one row of W at a time when G is the identity, and the same for any G since every row has its own optimum.
    """
    n = len(c.A)
    A = c.A.matrix.numpy() + damp * c.A.matrix.diagonal().mean().item() * np.eye(n)
    X = np.linalg.cholesky(A)  # A = X X^T
    gone = (removed[:, None] * c.width + torch.arange(c.width)).flatten().numpy()
    kept = np.setdiff1d(np.arange(n), gone)
    W = c.W.numpy()
    fitted = np.zeros_like(W)
    if len(kept):
        fitted[:, kept] = np.linalg.lstsq(X[kept].T, X.T @ W.T, rcond=None)[0].T
    change = (fitted - W) @ X
    return float(np.trace(c.G.matrix.numpy() @ change @ change.T))


def greedy_reference(c: Curvature, damp: float) -> tuple[list[int], list[float]]:
    """Remove, again and again, the unit whose dense refit is least bad."""
    units = len(c.A) // c.width
    removed: list[int] = []
    errors = [0.0]
    while len(removed) < units:
        left = [u for u in range(units) if u not in removed]
        tried = {u: residual(c, torch.tensor([*removed, u]), damp) for u in left}
        removed.append(min(tried, key=lambda u: tried[u]))
        errors.append(tried[removed[-1]])
    return removed, errors


@shapes
@pytest.mark.parametrize("identity", [True, False], ids=["identity G", "general G"])
def test_cumulative_error_is_the_residual_of_a_dense_fit(units: int, width: int, identity: bool) -> None:
    c = curvature(units, width, identity=identity, seed=units)
    (found,) = order([c], damp=1e-2)
    assert sorted(found.removed.tolist()) == list(range(units))
    for k in range(units + 1):
        assert float(found.error[k]) == pytest.approx(residual(c, found.removed[:k], 1e-2), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(("units", "width"), [(12, 1), (5, 3)], ids=["filters", "heads"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_plain_greedy_loop(units: int, width: int, seed: int) -> None:
    c = curvature(units, width, seed=seed)
    (found,) = order([c], damp=1e-2)
    removed, errors = greedy_reference(c, 1e-2)
    assert found.removed.tolist() == removed
    np.testing.assert_allclose(found.error.numpy(), errors, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("units", [PANEL - 1, PANEL, PANEL + 1, 2 * PANEL, 2 * PANEL + 1, 5 * PANEL + 3])
def test_panels_and_compaction_change_nothing(units: int) -> None:
    """Sizes around the panel's, and large enough to be flushed and compacted several times."""
    c = curvature(units, 1, seed=units)
    (found,) = order([c])
    removed, errors = rank_one_loop(c, 1e-2)
    assert found.removed.tolist() == removed
    np.testing.assert_allclose(found.error.numpy(), errors, rtol=1e-6, atol=1e-8)


def rank_one_loop(c: Curvature, damp: float) -> tuple[list[int], list[float]]:
    """The update of the design as it is written: W -= w_j B_j: / B_jj, B -= B_:j B_j: / B_jj, one filter at a time."""
    A, W, G = (t.clone() for t in (c.A.matrix, c.W, c.G.matrix))
    A += damp * A.diagonal().mean() * torch.eye(len(A), dtype=A.dtype)
    B = torch.linalg.inv(A)
    left = torch.ones(len(A), dtype=torch.bool)
    removed, errors = [], [0.0]
    for _ in range(len(A)):
        costs = ((G @ W) * W).sum(0) / B.diagonal()
        j = int(costs.masked_fill(~left, torch.inf).argmin())
        removed.append(j)
        errors.append(errors[-1] + float(costs[j]))
        W -= torch.outer(W[:, j], B[j] / B[j, j])
        B -= torch.outer(B[:, j], B[j]) / B[j, j]
        left[j] = False
        B[j], B[:, j], W[:, j] = 0, 0, 0
        B[j, j] = 1
    return removed, errors


def test_sublayers_of_one_shape_do_not_disturb_each_other() -> None:
    sizes = [(20, 1), (5, 3), (20, 1), (20, 1), (5, 3), (0, 1)]
    curvatures = [curvature(u, w, seed=i) for i, (u, w) in enumerate(sizes)]
    together = order(curvatures)
    for c, found in zip(curvatures, together, strict=True):
        (alone,) = order([c])
        assert found.removed.tolist() == alone.removed.tolist()
        torch.testing.assert_close(found.error, alone.error)


@settings(deadline=None, max_examples=25)
@given(a=st.floats(-6, 6), g=st.floats(-6, 6), seed=st.integers(0, 99))
def test_scaling_the_curvature_scales_the_curve_and_keeps_the_order(a: float, g: float, seed: int) -> None:
    c = curvature(8, 1, seed=seed)
    (plain,) = order([c])
    (scaled,) = order([Curvature(Gram([c.A.matrix * 10**a]), Gram([c.G.matrix * 10**g]), c.W, c.width)])
    assert scaled.removed.tolist() == plain.removed.tolist()
    torch.testing.assert_close(scaled.error, plain.error * 10 ** (a + g), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=25)
@given(units=st.integers(1, 20), width=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_curve_never_falls(units: int, width: int, seed: int) -> None:
    (found,) = order([curvature(units, width, seed=seed)])
    assert float(found.error[0]) == 0
    assert (found.error.diff() >= 0).all()


def test_single_precision_statistics_are_worked_on_in_double() -> None:
    c = curvature(30, 1, seed=3)
    single = Curvature(Gram([c.A.matrix.float()]), Gram([c.G.matrix.float()]), c.W.float(), 1)
    (found,) = order([single])
    A, G = (Gram([one.matrix.double()]) for one in (single.A, single.G))
    (expected,) = order([Curvature(A, G, single.W.double(), 1)])
    assert found.removed.tolist() == expected.removed.tolist()
    assert found.error.dtype == torch.float64


def test_the_statistics_are_left_as_they_were() -> None:
    c = curvature(10, 1)
    before = [t.clone() for t in (c.A.matrix, c.G.matrix, c.W)]
    order([c])
    assert all(torch.equal(a, b) for a, b in zip(before, (c.A.matrix, c.G.matrix, c.W), strict=True))


def test_dead_and_duplicate_filters_go_first_and_for_nothing() -> None:
    c = curvature(6, 1, seed=4)
    c.A.matrix[2], c.A.matrix[:, 2] = 0, 0  # never fires
    c.W[:, 5] = 0  # nobody listens
    (found,) = order([c])
    assert 5 in found.removed[:2].tolist()
    assert found.removed[:2].sort().values.tolist() == [2, 5]
    assert float(found.error[2]) < 0.2 * float(found.error[3])


def test_a_sublayer_that_never_fired_costs_nothing() -> None:
    c = curvature(5, 1)
    (found,) = order([Curvature(Gram([torch.zeros_like(c.A.matrix)]), c.G, c.W, 1)])
    assert float(found.error[-1]) < 1e-100
    assert sorted(found.removed.tolist()) == list(range(5))


def test_kept_takes_the_last_to_go() -> None:
    o = Order(torch.tensor([3, 0, 2, 1]), torch.zeros(5))
    assert [o.kept(k).tolist() for k in range(5)] == [[], [1], [1, 2], [0, 1, 2], [0, 1, 2, 3]]


@shapes
def test_without_damping_a_singular_matrix_is_ordered_too(units: int, width: int) -> None:
    c = curvature(units, width)
    c.A.matrix.zero_()[0, 0] = 1.0  # of rank one
    (found,) = order([c], damp=0.0)
    assert sorted(found.removed.tolist()) == list(range(units))
    assert bool(found.error.isfinite().all())


def test_fewer_sublayers_of_wide_units_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a wide unit take more memory than B."""
    monkeypatch.setitem(TOGETHER, "cpu", 8 * 210 * 450)
    for units, width, batches in ((210, 1, [2, 2]), (3, 70, [1, 1, 1, 1])):
        found = _bounded([[0, 1, 2, 3]], [curvature(units, width)] * 4)
        assert [len(members) for members in found] == batches


@pytest.mark.parametrize("name", ["A", "G", "W"])
def test_statistics_that_are_not_finite_end_with_an_error(name: str) -> None:
    c = curvature(6, 1)
    {"A": c.A.matrix, "G": c.G.matrix, "W": c.W}[name][0, 0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        order([curvature(6, 1, seed=1), c])


def test_the_matrices_of_one_batch_are_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when garbage is collected: for wide FFNs they take gigabytes."""
    begun: list[weakref.ref[_State]] = []
    start = _State.start

    def noted(batch: Sequence[Curvature], damp: float) -> _State:
        assert all(ref() is None for ref in begun)
        state = start(batch, damp)
        begun.append(weakref.ref(state))
        return state

    monkeypatch.setattr(_State, "start", staticmethod(noted))
    gc.disable()
    try:
        order([curvature(12, 1), curvature(5, 3), curvature(40, 1)])
    finally:
        gc.enable()
    assert len(begun) == 3
