"""The written-out gradient of a regression's factor is that of the factorization itself."""

import torch

from bayesify.maths.regression import Regression, RegressionFactors


def weighed(found: Regression, noise: torch.Tensor) -> torch.Tensor:
    """A number that depends on every field that has a gradient."""
    return (found.draw(noise) ** 2).sum() + found.closed_kl() + found.root.sin().sum() + 0.3 * found.log_det


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    root, cross, noise = (torch.randn(2, 5, size, dtype=torch.float64, generator=generator) for size in (7, 3, 3))
    return root @ root.mT, cross, noise


def by_cholesky(gram: torch.Tensor, cross: torch.Tensor) -> Regression:
    tril = torch.linalg.cholesky(gram + torch.eye(gram.shape[-1], dtype=gram.dtype))
    root = torch.linalg.inv(tril)
    logs = tril.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))
    return Regression(root.mT @ (root @ cross), root, logs, torch.zeros(len(gram)))


def test_it_equals_that_of_the_cholesky_factor() -> None:
    gram, cross, noise = problem()
    found = []
    for solve in (lambda a, b: RegressionFactors(a, b).solve(), by_cholesky):
        inputs = [gram.clone().requires_grad_(), cross.clone().requires_grad_()]
        value = weighed(solve(*inputs), noise)
        grads = torch.autograd.grad(value, inputs)
        found.append((value, 0.5 * (grads[0] + grads[0].mT), grads[1]))  # only the symmetric part has a meaning
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_it_equals_that_under_vmap() -> None:
    gram, cross, noise = problem()
    several = [torch.stack([value, 2 * value]) for value in (gram, cross)]
    grad = torch.func.grad(lambda a, b: weighed(RegressionFactors(a, b).solve(), noise), argnums=(0, 1))
    together = torch.func.vmap(grad)(*several)
    for index in range(2):
        for own, other in zip(together, grad(several[0][index], several[1][index]), strict=True):
            torch.testing.assert_close(own[index], other, rtol=1e-10, atol=1e-10)
