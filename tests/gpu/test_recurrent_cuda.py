"""Recurrent networks on a GPU: kernels of cuDNN want weights without gaps, and have no derivative in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import function_space, likelihoods

pytestmark = pytest.mark.gpu


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 6, 5, generator=generator), torch.randint(3, (32,), generator=generator)


@pytest.mark.parametrize(
    "method", ["mean_field", "k_tied", "matrix_normal", "rank_one", "inducing", "walsh_hadamard", "dropout"]
)
def test_every_posterior_trains_and_predicts(method: str) -> None:
    torch.manual_seed(0)
    x, y = data()
    bnn = bayesify.bayesianize(Reader().cuda(), method, likelihood=likelihoods.Categorical())
    bayesify.fit(bnn, [(x, y)] * 3, epochs=2, seed=0, progress=False)
    assert bnn.predict(x.cuda()).probs.isfinite().all()


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_laplace_is_that_of_the_cpu(covariance: str) -> None:
    torch.manual_seed(0)
    net, (x, y) = Reader().eval(), data()
    expected = bayesify.Laplace(net, likelihoods.Categorical(), "all", covariance).fit([(x, y)])
    found = bayesify.Laplace(net.cuda(), likelihoods.Categorical(), "all", covariance).fit([(x.cuda(), y.cuda())])
    assert torch.allclose(found.covariance_matrix().cpu(), expected.covariance_matrix(), rtol=1e-2, atol=1e-4)
    assert torch.backends.cudnn.enabled


def test_function_space_trains() -> None:
    torch.manual_seed(0)
    x, y = data()
    bnn = bayesify.bayesianize(Reader().cuda(), "mean_field", likelihood=likelihoods.Categorical())
    model = bayesify.FunctionSpaceVI(bnn, context=function_space.DatasetContext(torch.randn(8, 6, 5)))
    bayesify.fit(model, [(x, y)] * 2, epochs=2, seed=0, progress=False)
    assert model.predict(x.cuda()).probs.isfinite().all()
