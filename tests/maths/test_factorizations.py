"""Factorizations of curvatures and covariances: in float64 inside, whatever the network's type, with the same errors everywhere."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import generator
from torch import Tensor, nn

from bayesify import Laplace, likelihoods, subnetwork
from bayesify.baselines.noisy_kfac import fisher_root, inverse_root
from bayesify.function_space.divergence import dense_kl
from bayesify.laplace.covariances import FullCovariance
from bayesify.maths.positive_definite import leading_singular, stable_cholesky, stable_eigh


def flat_curvature(size: int = 200, alive: int = 17, largest: float = 5.8e-8) -> Tensor:
    """A float32 curvature as dead units leave it: most rows exactly 0, the others tiny."""
    rows = torch.randn(alive, alive, generator=generator(0))
    places = torch.randperm(size, generator=generator(1))[:alive]
    curvature = torch.zeros(size, size)
    curvature[places[:, None], places] = rows @ rows.T
    return curvature * (largest / curvature.diagonal().max())


@pytest.fixture
def only_float64(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Factorizations of a machine whose LAPACK fails in float32; the names of those that were called."""
    called: list[str] = []
    for name in ("eigh", "eigvalsh", "cholesky", "cholesky_ex"):
        original = getattr(torch.linalg, name)

        def wide(matrix: Tensor, original: Any = original, name: str = name) -> Any:
            called.append(name)
            if matrix.dtype != torch.float64:
                raise torch.linalg.LinAlgError(f"linalg.{name}: the algorithm failed to converge")
            return original(matrix)

        monkeypatch.setattr(torch.linalg, name, wide)
    return called


def test_eigenvectors_of_a_flat_curvature(only_float64: list[str]) -> None:
    curvature = flat_curvature()
    assert int((curvature.diagonal() == 0).sum()) == 183
    values, vectors = stable_eigh(curvature, "curvature")
    assert values.dtype == vectors.dtype == torch.float32
    assert only_float64 == ["eigh"]
    expected = torch.linalg.eigvalsh(curvature.double())
    largest = float(expected.amax())
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6 * largest)
    rebuilt = (vectors.double() * values.double()) @ vectors.double().T
    torch.testing.assert_close(rebuilt, curvature.double(), rtol=0, atol=1e-6 * largest)


def test_eigenvectors_that_are_not_found_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("failed to converge (error code 37579)")

    with pytest.raises(ValueError, match="the curvature is not finite; check the data"):
        stable_eigh(torch.full((2, 2), math.nan), "the curvature")
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(ValueError, match=r"the curvature \(3 x 3\): the eigenvectors .* leave out weights"):
        stable_eigh(torch.eye(3), "the curvature")


def test_a_flat_posterior_is_that_of_float64(only_float64: list[str]) -> None:
    """Precision, determinant and inverse of a curvature that the prior outweighs by 1e8, and of one that outweighs it by 1e6."""
    for curvature in (flat_curvature(), flat_curvature(largest=1e6)):
        prior = torch.linspace(0.5, 2, 200)
        found = FullCovariance(SimpleNamespace(rows=lambda given: given), curvature, prior)  # type: ignore[arg-type]
        exact = torch.linalg.inv(curvature.double() + torch.diag(prior.double()))
        torch.testing.assert_close(found.dense().double(), exact, rtol=1e-4, atol=1e-6)
        rows = torch.randn(2, 3, 200, generator=generator(2))
        wide = rows.double().movedim(1, 0)
        expected = wide @ exact @ wide.transpose(-1, -2)
        for outputs in (found.outputs(rows), found.outputs(rows, [1.0])[0]):
            assert outputs.dtype == torch.float32
            torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-4)
        log_det = torch.logdet(curvature.double() + torch.diag(prior.double())) - prior.double().log().sum()
        torch.testing.assert_close(found.log_det_ratio().double(), log_det, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_laplace_with_dead_units_never_factorizes_in_float32(structure: Any, only_float64: list[str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    x = torch.randn(60, 3)
    y = x[:, :2].sin() + 0.1**0.5 * torch.randn(60, 2)
    optimizer = torch.optim.Adam(net.parameters(), 0.02, weight_decay=0.002)
    for _ in range(200):  # to its maximum, where both searches have an optimum inside
        with torch.no_grad():
            net[0].weight[:15], net[0].bias[:15] = 0.0, -0.1  # type: ignore[union-attr,operator,index]
        optimizer.zero_grad()
        (net(x[:40]) - y[:40]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        net[0].weight[:15], net[0].bias[:15] = 0.0, -0.1  # type: ignore[union-attr,operator,index]
        assert int((net[0](x) < 0).all(0).sum()) == 15
    laplace = Laplace(net, likelihoods.Gaussian(0.1), covariance=structure).fit([(x[:40], y[:40])])
    laplace.tune_prior_precision(method="evidence")
    laplace.tune_prior_precision([(x[40:], y[40:])], method="validation")
    prediction = laplace.predict(x)
    assert prediction.outputs.dtype == prediction.log_prob(y).dtype == torch.float32
    assert bool(torch.isfinite(prediction.log_prob(y)).all())
    assert bool(torch.isfinite(laplace.draw(2)(x)).all())
    assert "eigh" in only_float64


def test_other_factorizations_of_curvatures_are_in_float64(only_float64: list[str]) -> None:
    gap = subnetwork.posterior_gap(torch.eye(4) + 0.5, torch.tensor([True, False, True, True]))
    reference = subnetwork.posterior_gap(torch.eye(4).double() + 0.5, torch.tensor([True, False, True, True]))
    assert gap.dtype == torch.float32
    torch.testing.assert_close(gap.double(), reference, rtol=1e-6, atol=0)
    root = inverse_root(flat_curvature(), torch.tensor(1e-9))
    exact = torch.linalg.inv(flat_curvature().double() + 1e-9 * torch.eye(200).double())
    torch.testing.assert_close((root @ root.T).double(), exact, rtol=1e-4, atol=1e-5 * float(exact.max()))
    assert fisher_root(likelihoods.HeteroscedasticGaussian(), torch.randn(5, 4)).dtype == torch.float32


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_named_whatever_lapack_notices(
    value: float, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some machines' factorizations report NaN, others let it through."""

    def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.full_like(matrix, math.nan).tril() if not noticed else torch.eye(3).to(matrix)
        return factor, torch.full(matrix.shape[:-2], int(noticed), dtype=torch.int32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", cholesky_ex)
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(ValueError, match="the matrix is not finite; check the data"):
        stable_cholesky(matrix, "the matrix")
    with pytest.raises(ValueError, match="has no Cholesky factor"):
        dense_kl(torch.zeros(3), matrix, torch.zeros(3), torch.eye(3), jitter=1e-6)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9)])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_leading_singular_vectors_are_those_of_the_whole_decomposition(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(*shape, dtype=torch.float64)
    p, s, qt = leading_singular(matrix, rank)
    exact = torch.linalg.svdvals(matrix)[:rank]
    torch.testing.assert_close(s, exact)
    torch.testing.assert_close(p.mT @ p, torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(qt @ qt.mT, torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(p.mT @ matrix @ qt.mT, exact.diag())
    poor = torch.randn(12, 1, dtype=torch.float64) @ torch.randn(1, 30, dtype=torch.float64)
    p, s, qt = leading_singular(poor, 3)  # of rank one: the rest is 0, its vectors orthonormal all the same
    torch.testing.assert_close(p @ s.diag() @ qt, poor)
    torch.testing.assert_close(qt @ qt.mT, torch.eye(3, dtype=torch.float64))
