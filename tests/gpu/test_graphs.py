"""Draws by recorded CUDA graphs are the draws without them. Run with `-m gpu`."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths import matheron
from bayesify.posteriors.common.base import DrawRequest
from bayesify.running import cuda_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
POSTERIORS = {
    "mean_field": lambda: posteriors.MeanField(),
    "inducing": lambda: posteriors.InducingWeights(8, 8),
    "inducing_matrix": lambda: posteriors.InducingWeights(8, 8, q="matrix"),
    "walsh_hadamard": lambda: posteriors.WalshHadamard(),
}


@pytest.fixture(params=list(POSTERIORS))
def problem(request):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    bnn = bayesify.bayesianize(net, POSTERIORS[request.param](), likelihood=likelihoods.Categorical())
    x = torch.randn(64, 5, device="cuda")
    return bnn, x, (x[:, 0] > 0).long()


def run(problem, patience, monkeypatch):
    """Losses of some steps with accumulated gradients, and draws between them."""
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", patience)
    bnn, x, y = problem
    state = {name: value.clone() for name, value in bnn.state_dict().items()}
    generator = torch.Generator("cuda").manual_seed(7)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            loss = -bnn.elbo(x, y, num_data=64, generator=generator) / 128
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for many in (2, 1) * 3:
                seen += bnn.draw(many, generator=generator).weights["0.weight"].flatten().tolist()
    bnn.load_state_dict(state)
    return seen


def test_recorded_draws_and_gradients_are_bit_identical(problem, monkeypatch):
    assert run(problem, 1, monkeypatch) == run(problem, 10**9, monkeypatch)


@pytest.mark.parametrize(
    ("family", "keep"),
    [
        (posteriors.RankOne, None),
        (posteriors.Dropout, None),
        (posteriors.MeanField, 0.5),
        (posteriors.InducingWeights, 0.5),
    ],
)
def test_families_without_a_kernel_of_their_own_are_recorded_to_the_bit(family, keep, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    bnn = bayesify.bayesianize(net, family(), likelihood=likelihoods.Categorical())
    if keep is not None:
        bayesify.prune(bnn, keep)
    x = torch.randn(64, 5, device="cuda")
    problem = bnn, x, (x[:, 0] > 0).long()
    recorded = run(problem, 1, monkeypatch)
    kept = bnn._road.captured.of(bnn.posterior)._kinds.values()
    assert {kind.made.training for kind in kept if kind.made is not None} == {False, True}
    assert recorded == run(problem, 10**9, monkeypatch)


def test_two_bounds_before_one_backward_pass(problem, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", 1)
    bnn, x, y = problem
    for _ in range(3):
        bnn.elbo(x, y, num_data=64).backward()
    bnn.zero_grad()
    generator = torch.Generator("cuda").manual_seed(1)
    (bnn.elbo(x, y, num_data=64, generator=generator) + bnn.elbo(x, y, num_data=64, generator=generator)).backward()
    together = [parameter.grad.clone() for parameter in bnn.parameters()]
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", 10**9)
    bnn.zero_grad()
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(2):
        bnn.elbo(x, y, num_data=64, generator=generator).backward()
    for one, parameter in zip(together, bnn.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)  # the order of additions differs


def test_a_late_second_backward_pass_is_refused(problem, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", 1)
    bnn, x, y = problem
    for _ in range(3):
        bnn.elbo(x, y, num_data=64).backward()
    first = bnn.elbo(x, y, num_data=64)
    first.backward(retain_graph=True)
    bnn.elbo(x, y, num_data=64).backward()
    if bnn.posterior.draws_fused(DrawRequest(num_draws=1, prior=bnn.prior.draw(1))):
        first.backward()  # its draws are its own
        return
    with pytest.raises(RuntimeError, match="once on each elbo"):
        first.backward()


def test_inducing_gradients_under_autocast(monkeypatch):
    """Products in bfloat16 change gradients by no more than the network's own roundings."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 120), nn.ReLU(), nn.Linear(120, 10)).cuda()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(16, 16), likelihood=likelihoods.Categorical())
    x, y = torch.randn(64, 100, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    found = []
    for autocast in (True, True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = -bnn.elbo(x, y, num_data=64, generator=torch.Generator("cuda").manual_seed(1))
        found.append(
            torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(bnn.posterior.parameters()))])
        )
        monkeypatch.setattr(posteriors.InducingWeights, "_low_precision", lambda *_: None)
    low, cast, exact = found
    assert 0 < (low - cast).norm() < 2 * (cast - exact).norm() + 2**-8 * exact.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_all_layers_at_once_are_each_layer_by_itself(autocast, monkeypatch):
    """Bounds and gradients of layers whose U have three sizes, by products of all of them and one by one."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 24, 3), nn.Conv2d(24, 24, 3), nn.Flatten(), nn.Linear(96, 20), nn.Linear(20, 3)
    ).cuda()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(16, 16), likelihood=likelihoods.Categorical())
    x, y = torch.randn(32, 1, 8, 8, device="cuda"), torch.randint(0, 3, (32,), device="cuda")
    stacked = matheron._factorize_stack
    seen, found = [], []
    monkeypatch.setattr(matheron, "_factorize_stack", lambda blocks: seen.append(1) or stacked(blocks))
    for kinds in (("cuda",), ()):
        monkeypatch.setattr(matheron, "STACKS_ON", kinds)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = -bnn.elbo(x, y, num_data=32, generator=torch.Generator("cuda").manual_seed(1))
        grads = torch.autograd.grad(loss, list(bnn.posterior.parameters()))
        found.append((loss.detach(), torch.cat([grad.flatten() for grad in grads])))
    assert seen == [1]
    (loss, grad), (other_loss, other_grad) = found
    torch.testing.assert_close(loss, other_loss, rtol=2**-8 if autocast else 1e-5, atol=0.0)
    # Sums in another order change the last bits of draws, which the network rounds to 8 bits, or to TF32's 11.
    assert (grad - other_grad).norm() < (2**-6 if autocast else 2**-10) * other_grad.norm()


@pytest.mark.parametrize("many", [1, 2])
def test_a_draw_that_ran_ahead_of_a_change_is_dropped(many, monkeypatch):
    """Parameters that changed unseen by versions give the draws that they give without graphs, and the numbers after them too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(8, 8))
    state = {name: value.clone() for name, value in bnn.state_dict().items()}
    found = []
    for patience in (1, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", patience)
        bnn.load_state_dict(state)
        torch.cuda.manual_seed(3)
        drawn = []
        with torch.no_grad():
            for _ in range(3):
                drawn += [bnn.draw(many).weights[name].clone() for _ in range(4) for name in ("0.weight", "2.bias")]
                for parameter in bnn.posterior.parameters():
                    parameter.data.mul_(1.1)
            drawn.append(torch.randn(3, device="cuda"))
        found.append(drawn)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_of_a_graph_draw_what_one_group_after_the_other_draws(dtype, monkeypatch):
    torch.manual_seed(0)
    sizes = [3, 8, 24, 24, 64, 64, 130, 40]
    layers = [nn.Conv2d(one, other, 3) for one, other in pairwise(sizes)]
    bnn = bayesify.bayesianize(nn.Sequential(*layers).cuda().to(dtype), posteriors.InducingWeights(16, 16))
    found = []
    for patience in (1, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", patience)
        generator = torch.Generator("cuda").manual_seed(3)
        with torch.no_grad():
            draws = [bnn.draw(5, generator=generator).weights for _ in range(20)]
        found.append([draw[name].clone() for draw in draws for name in draw])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("many", [1, 2])
def test_the_first_replay_after_a_capture_on_a_busy_device(many, monkeypatch):
    """Torch sets the offset of random numbers to zero on the capture's stream, which may come late."""
    begin, captured = torch.cuda.CUDAGraph.capture_begin, []

    def late(*args, **kwargs):
        torch.cuda._sleep(4 * 10**8)  # a fifth of a second of the capture's stream
        begin(*args, **kwargs)
        captured.append(1)
        torch.cuda._sleep(10**9)  # in the graph: half a second from the offset that a replay sets to the first numbers

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    found = []
    for patience in (1, 10**9):
        torch.manual_seed(0)
        bnn = bayesify.bayesianize(net, posteriors.InducingWeights(8, 8))
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", patience)
        torch.cuda.manual_seed(3)
        with torch.no_grad():
            found.append([bnn.draw(many).weights["0.weight"].clone() for _ in range(4)])
    assert captured
    assert all(map(torch.equal, *found))
