"""Walsh-Hadamard weights against dense matrices: products, moments, geometry, KL, flows, and what they never allocate."""

import copy
import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, call, close, convert, disturb, generator, targets
from dense_reference import entries, kl_normals
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors
from bayesify.maths import walsh_hadamard as maths
from bayesify.maths.noise import NoiseSource
from bayesify.maths.planar_flow import IDENTITY_PRODUCT, invertible, planar
from bayesify.posteriors.walsh_hadamard.blocks import Blocks, LocalWalshHadamardWeight, WalshHadamardWeight
from bayesify.priors import PriorDraw
from bayesify.running.runner import Runner
from bayesify.transforms import hadamard

FAMILIES = ["diagonal", "full", "flow"]
SHAPES = [(1, 1), (2, 3), (5, 5), (8, 8), (13, 50), (50, 13), (4, 64), (1, 50), (50, 1), (3, 1)]


def dense_h(size: int) -> Tensor:
    """Orthonormal, by recursion."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def dense_w(left: Tensor, g: Tensor, right: Tensor) -> Tensor:
    h = dense_h(len(g))
    return left.diag() @ h @ g.diag() @ h @ right.diag()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- maths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_products_and_entries(size: int) -> None:
    left, g, right, x = (numbers(size) for _ in range(4))
    w = dense_w(left, g, right)
    torch.testing.assert_close(maths.materialize(left, g, right), w, rtol=0, atol=1e-12)
    torch.testing.assert_close(maths.multiply(x, left, g, right), w @ x, rtol=0, atol=1e-12)
    c = maths.dyadic_values(g)
    assert all(maths.dyadic(c)[i, j] == c[i ^ j] for i in range(size) for j in range(size))


def test_derivatives_of_the_entries() -> None:
    c = numbers(2, 4).requires_grad_()
    torch.autograd.gradcheck(maths.dyadic, c, check_batched_grad=True)
    torch.autograd.gradgradcheck(maths.dyadic, c)
    rows = numbers(4, 3, 2)
    mapped = torch.func.vmap(torch.func.vmap(maths.dyadic, in_dims=1), in_dims=2)(rows)
    torch.testing.assert_close(mapped, maths.dyadic(rows.permute(2, 1, 0)))


def test_geometry() -> None:
    """Appendix B: vec W = L Q g, the columns of Q orthonormal; vec stacks columns."""
    left, g, right = (numbers(8) for _ in range(3))
    stretch, rotation = maths.geometry(left, right)
    torch.testing.assert_close(rotation.T @ rotation, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)
    w = dense_w(left, g, right)
    torch.testing.assert_close(stretch * (rotation @ g), w.T.flatten(), rtol=0, atol=1e-12)


def moments(left: Tensor, right: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix A: M = S1 H diag(mu) H S2, U = S1 H (Sigma o H S2^2 H) H S1, and V, which is S2 H (Sigma o H S1^2 H) H S2 / tr U."""

    def side(own: Tensor, other: Tensor) -> Tensor:
        inner = covariance * maths.dyadic(maths.dyadic_values(other.square()))
        return hadamard(hadamard(inner).mT) * own.unsqueeze(-1) * own

    row = side(left, right)
    return maths.materialize(left, mean, right), row, side(right, left) / row.trace()


def test_moments_of_appendix_a() -> None:
    """Against the covariance of vec W, A Sigma A^T, which is not the Kronecker product of a matrix normal and has rank D."""
    size = 4
    left, right, mean, root = numbers(size), numbers(size), numbers(size), numbers(size, size)
    m, u, v = moments(left, right, mean, root @ root.T)
    stretch, rotation = maths.geometry(left, right)
    a = stretch[:, None] * rotation
    covariance = a @ root @ root.T @ a.T
    by_entry = covariance.view(size, size, size, size)  # [col, row, col', row']
    rows = torch.einsum("jijk->ik", by_entry)
    torch.testing.assert_close(m, dense_w(left, mean, right), rtol=0, atol=1e-12)
    torch.testing.assert_close(u, rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(v, torch.einsum("jiki->jk", by_entry) / rows.trace(), rtol=0, atol=1e-12)
    assert v.trace().item() == pytest.approx(1.0)
    assert torch.linalg.matrix_rank(covariance) == size
    assert not torch.allclose(torch.kron(v, u), covariance, atol=0.1)


def test_empirical_moments_of_appendix_a() -> None:
    """n = 20000 draws: each entry of U within k = 5 standard errors, estimated from the draws' own spread."""
    n, k, size = 20_000, 5.0, 4
    left, right, mean, root = numbers(size), numbers(size), numbers(size), numbers(size, size)
    m, u, v = moments(left, right, mean, root @ root.T)
    w = maths.materialize(left, mean + numbers(n, size) @ root.T, right)
    for products, expected in (((w - m) @ (w - m).mT, u), ((w - m).mT @ (w - m), v * u.trace())):
        error = (products.mean(0) - expected).abs()
        assert bool((error <= k * products.std(0) / math.sqrt(n)).all())
    assert bool(((w.mean(0) - m).abs() <= k * w.std(0) / math.sqrt(n)).all())


def test_nearest() -> None:
    """Alternating least squares never moves away, and finds a matrix that is of this form up to a local optimum."""
    matrix = numbers(3, 8, 8)
    distance = [
        float((maths.materialize(*maths.nearest(matrix, steps, generator())) - matrix).norm())
        for steps in (1, 2, 5, 20, 100)
    ]
    assert distance == sorted(distance, reverse=True)
    assert distance[-1] < 0.9 * float(matrix.norm())
    kept = maths.materialize(
        *maths.nearest(maths.materialize(numbers(8).abs() + 1, numbers(8), numbers(8).abs() + 1)[None], 200)
    )
    assert kept.shape == (1, 8, 8)
    assert bool(torch.isfinite(maths.materialize(*maths.nearest(torch.zeros(2, 4, 4)))).all())


# -- blocks and the structured weight --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_a_matrix(shape: tuple[int, int]) -> None:
    blocks = Blocks.cover(*shape)
    matrix = numbers(*shape)
    assert torch.equal(blocks.assemble(blocks.disassemble(matrix)), matrix)
    assert blocks.size & (blocks.size - 1) == 0
    left, g, right = (numbers(blocks.count, blocks.size) for _ in range(3))
    w = blocks.assemble(torch.stack([dense_w(*factors) for factors in zip(left, g, right, strict=True)]))
    assert w.shape == shape
    if blocks.along != "entries":
        x = numbers(2, 7, shape[1])
        torch.testing.assert_close(blocks.multiply(x, left, g, right), x @ w.T, rtol=0, atol=1e-11)


def test_single_outputs_and_inputs_are_one_block() -> None:
    for shape in ((1, 50), (50, 1)):
        assert (Blocks.cover(*shape).size, Blocks.cover(*shape).count) == (8, 1)  # 64 entries cover 50
    assert Blocks.cover(1, 65).size == 16
    assert (Blocks.cover(50, 13).size, Blocks.cover(50, 13).count) == (16, 4)


@pytest.fixture
def multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of any size multiply through their factors."""
    monkeypatch.setattr("bayesify.posteriors.walsh_hadamard.posterior.MIN_SIZE_FOR_PRODUCTS", 1)


def wide(covariance: str = "diagonal", **more: Any) -> BayesianNetwork:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 3))
    posterior = posteriors.WalshHadamard(covariance, init_std=0.1, **more)
    bnn = bayesify.bayesianize(net.double(), posterior, likelihood=likelihoods.Gaussian(0.5))
    disturb(bnn)
    return bnn


@pytest.mark.usefixtures("multiplying")
@pytest.mark.parametrize("covariance", FAMILIES)
def test_the_structured_weight_is_the_formed_one(covariance: str) -> None:
    """Outputs and gradients, one draw, many by vmap and in a loop, sequences; copies work after a forward pass."""
    bnn, x = wide(covariance), numbers(6, 5)
    draws = bnn.draw(3, generator=generator())
    kinds = {name: type(value) for name, value in draws.weights.items()}
    assert kinds["0.weight"] is kinds["2.weight"] is kinds["4.weight"] is WalshHadamardWeight
    assert kinds["0.bias"] is Tensor
    expected = draws.materialize()(x).detach()
    close(draws(x), expected, torch.float64)
    close(draws[1](x), expected[1], torch.float64)
    runner = Runner(bnn.network, bnn.weights)
    for mode in ("loop", "vmap"):
        close(runner.run(draws.weights, (x,), {}, mode=mode), expected, torch.float64)  # type: ignore[arg-type]
    close(draws(x.view(2, 3, 5)), expected.view(3, 2, 3, 3), torch.float64)
    parameters = list(bnn.posterior.parameters())
    fast = torch.autograd.grad(bnn.draw(3, generator=generator())(x).square().sum(), parameters, allow_unused=True)
    slow = torch.autograd.grad(draws.materialize()(x).square().sum(), parameters, allow_unused=True)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other)
    assert copy.deepcopy(draws.weights["0.weight"]).shape == (3, 12, 5)
    close(pickle.loads(pickle.dumps(bnn)).draw(3, generator=generator())(x), expected, torch.float64)
    bnn.elbo(x, numbers(6, 3), num_data=6, num_draws=2).backward()


@pytest.mark.usefixtures("multiplying")
def test_the_structured_weight_under_autocast() -> None:
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(), likelihood=likelihoods.Gaussian(0.5))
    x = torch.randn(4, 5)
    with torch.no_grad():
        exact = bnn.draw(2, generator=generator())(x)
        with torch.autocast("cpu", torch.bfloat16):
            lower = bnn.draw(2, generator=generator())(x)
    assert lower.dtype == torch.bfloat16
    torch.testing.assert_close(lower.float(), exact, rtol=0.05, atol=0.05)


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return output


def test_a_wide_layer_is_small() -> None:
    """4 x 4096 numbers for 4096 x 4096 weights, and no pass allocates anything near 4096 x 4096."""
    net = nn.Linear(4096, 4096)
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(), likelihood=likelihoods.Gaussian(0.5))
    assert bnn.posterior.count_by_weight() == {"weight": 4 * 4096, "bias": 2 * 4096}
    assert bayesify.count_parameters(bnn.posterior) == 6 * 4096
    x, y = torch.randn(8, 4096), torch.randn(8, 4096)
    with Allocations() as made:
        bnn.elbo(x, y, num_data=8, num_draws=2).backward()
    assert 8 * 4096 <= made.largest <= 4 * 8 * 4096
    with Allocations() as made, torch.no_grad():
        bnn.draw(2)(x)
    assert made.largest <= 4 * 8 * 4096


# -- the posterior ---------------------------------------------------------------------------------------------------


def linear_map(part: Any, weight: str) -> tuple[Tensor, int, slice]:
    """A with vec(weight) = A g, row-major, for g of all its blocks one after the other; D; and its blocks."""
    for size, members in part.groups.items():
        for member in members:
            if member.weight.name != weight:
                continue
            chosen = slice(member.start, member.stop)
            left, right = (side[str(size)][chosen].detach().double() for side in (part.left, part.right))
            columns = []
            for block in range(member.blocks.count):
                for entry in range(size):
                    unit = torch.zeros(member.blocks.count, size, dtype=torch.float64)
                    unit[block, entry] = 1.0
                    square = torch.stack([dense_w(*factors) for factors in zip(left, unit, right, strict=True)])
                    columns.append(member.weight.from_matrix(member.blocks.assemble(square)).flatten())
            return torch.stack(columns, dim=1), size, chosen
    raise KeyError(weight)


def dense_g(part: Any, size: int, chosen: slice) -> tuple[Tensor, Tensor]:
    """Mean and covariance of g of some blocks, one after the other."""
    family = part.g[str(size)]
    mean, std = family.mean_value[chosen].detach(), family.log_std[chosen].detach().exp()
    if part.covariance == "diagonal":
        return mean.flatten(), torch.diag(std.flatten() ** 2)
    factors = []
    for packed, scale in zip(family.lower_value[chosen].detach(), std, strict=True):
        factor, position = torch.eye(size, dtype=torch.float64), 0
        for row in range(size):
            for col in range(row):
                factor[row, col] = packed[position]
                position += 1
        factors.append(scale[:, None] * factor)
    root = torch.block_diag(*factors)
    return mean.flatten(), root @ root.T


LEAVES = ["linear", "bilinear", "conv1d", "conv2d_depthwise", "transposed1d", "transposed3d", "embedding", "tied",
          "attention_kdim", "custom"]  # fmt: skip


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_moments_and_kl_are_the_dense_ones(covariance: str, leaf: str) -> None:
    """Mean and variance of every entry from the dense covariance of vec W; the KL from the dense normal over g."""
    bnn = convert("walsh_hadamard", CASES[leaf], torch.float64, covariance=covariance)
    part: Any = bnn.posterior
    total = 0.0
    for weight in part.weights:
        std = bnn.prior.std_of(weight)
        mean, variance = (moment[weight.name].detach() for moment in (part.mean(), part.variance()))
        if len(weight.shape) < 2:
            log_std = part.vectors.raw_std[weight.name].detach()
            torch.testing.assert_close(mean, part.vectors.mean_value[weight.name].detach())
            torch.testing.assert_close(variance, (2 * log_std).exp())
            flat, prior = mean.flatten(), torch.eye(mean.numel(), dtype=torch.float64) * std**2
            total += float(kl_normals(flat, torch.diag(variance.flatten()), torch.zeros_like(flat), prior))
            continue
        a, size, chosen = linear_map(part, weight.name)
        location, covariance_g = dense_g(part, size, chosen)
        torch.testing.assert_close(mean.flatten(), a @ location, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(variance.flatten(), (a @ covariance_g @ a.T).diagonal(), rtol=1e-9, atol=1e-12)
        prior = torch.eye(len(location), dtype=torch.float64) * size * std**2
        total += float(kl_normals(location, covariance_g, torch.zeros_like(location), prior))
    assert bnn.kl().item() == pytest.approx(total, rel=1e-9)
    assert bnn.draw(2, generator=generator()).kl.tolist() == pytest.approx([total] * 2, rel=1e-9)


@pytest.mark.thin(3)
@pytest.mark.parametrize("covariance", FAMILIES)
@pytest.mark.parametrize("leaf", ["linear", "conv2d", "embedding", "lstm", "custom"])
def test_every_family_trains_every_leaf(covariance: str, leaf: str) -> None:
    case = CASES[leaf]
    bnn = convert("walsh_hadamard", case, covariance=covariance)
    bnn.elbo(case.batch(), targets(case), num_data=10, num_draws=2, generator=generator()).backward()
    for key, parameter in bnn.named_parameters():
        assert parameter.grad is not None, key
        assert bool(torch.isfinite(parameter.grad).all()), key
        assert parameter.numel() == 1 or bool(parameter.grad.any()), key
    with torch.no_grad():
        draws = bnn.draw(3, generator=generator())
        assert call(draws, case.batch()).shape[0] == 3
        assert draws.kl.shape == (3,)
    again = BayesianNetwork(case.network(), [(None, type(bnn.posterior)(**options(bnn)))], likelihood=None,
                            prior=priors.Neal(bnn.posterior.prior_scale))  # fmt: skip
    again.posteriors.load_state_dict(bnn.posteriors.state_dict())
    with torch.no_grad():
        for name, value in again.draw(3, generator=generator()).weights.items():
            assert torch.equal(value, draws.weights[name])


def options(bnn: BayesianNetwork) -> dict[str, Any]:
    return {key: value for key, value in bnn.posterior.config().items() if key != "name"}


@pytest.mark.parametrize("covariance", FAMILIES)
def test_at_the_prior(covariance: str) -> None:
    """No KL in any draw, and the prior's variance of every entry; a flow's variance is from 1024 draws, 5 standard errors."""
    bnn = wide(covariance)
    bnn.set_to_prior()
    assert bnn.kl().item() == pytest.approx(0.0, abs=1e-9)
    assert bnn.draw(4).kl.tolist() == pytest.approx([0.0] * 4, abs=1e-9)
    for name, variance in bnn.posterior.variance().items():
        expected = bnn.prior.std_of(bnn.weights[name]) ** 2
        torch.testing.assert_close(variance, torch.full_like(variance, expected), rtol=1e-9, atol=0)
        assert float(bnn.posterior.mean()[name].detach().abs().max()) < 1e-9


def test_prior_scales_that_are_drawn() -> None:
    """With S values of a hierarchical prior's scale the KL has S entries, each that of a fixed prior."""
    for covariance in FAMILIES:
        part = wide(covariance).posterior
        stds = {name: torch.tensor([0.3, 0.7], dtype=torch.float64) for name in part.sizes()}
        together = part.kl(PriorDraw(stds))
        alone = [part.kl(PriorDraw(dict.fromkeys(part.sizes(), std))) for std in (0.3, 0.7)]
        torch.testing.assert_close(together, torch.stack(alone))


# -- flows -----------------------------------------------------------------------------------------------------------


def test_planar_layer() -> None:
    """Its log-determinant is that of the Jacobian by autograd, whatever u; IDENTITY_PRODUCT makes it the identity."""
    for _ in range(20):
        z, u, w, b = numbers(5), 3 * numbers(5), 2 * numbers(5), numbers(1)[0]
        jacobian = torch.func.jacrev(lambda z: planar(z, u, w, b)[0])(z)  # noqa: B023
        sign, log_det = torch.linalg.slogdet(jacobian)
        assert sign.item() == 1.0
        torch.testing.assert_close(planar(z, u, w, b)[1], log_det, rtol=1e-9, atol=1e-9)
        assert float((w * invertible(u, w)).sum()) > -1
    still = IDENTITY_PRODUCT * w / w.square().sum()
    torch.testing.assert_close(planar(z, still, w, b)[0], z, rtol=0, atol=1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 512])
def test_planar_layers_are_one_to_one_in_floating_point(size: int, dtype: torch.dtype) -> None:
    """w . u far below 0, where softplus is 0: the product of the stored numbers stays above -1, in exact arithmetic too."""
    seeded = generator(0)
    for scale in (1.0, 10.0, 100.0, 1000.0):
        w = torch.randn(50, size, dtype=torch.float64, generator=seeded)
        aside = torch.randn(50, size, dtype=torch.float64, generator=seeded) / math.sqrt(size)
        w, u = (w / math.sqrt(size)).to(dtype), (aside - scale * w / math.sqrt(size)).to(dtype)
        step = invertible(u, w)
        assert bool(((w * step).sum(-1) > -1).all())
        products = [
            sum(Fraction(a) * Fraction(b) for a, b in zip(*rows, strict=True))
            for rows in zip(w.tolist(), step.tolist(), strict=True)
        ]
        assert min(products) > -1
        z, b = torch.zeros(50, size, dtype=dtype), torch.zeros(50, dtype=dtype)  # tanh' is 1
        assert bool(torch.isfinite(planar(z, u, w, b)[1]).all())


def test_kl_of_a_flow() -> None:
    """log q - log p of each draw, by the change of variables with the Jacobian of the whole chain by autograd."""
    bnn = wide("flow", flow_length=3)
    part: Any = bnn.posterior
    part.vectors = None
    seeded = generator(3)
    prior = bnn.prior.draw(1)
    sizes = [part.left[str(size)].numel() for size in part.groups]
    total = torch.zeros(2, dtype=torch.float64)
    request = posteriors.DrawRequest(num_draws=2, prior=prior, noise=NoiseSource(generator(3)))
    for (size, members), noise in zip(
        part.groups.items(), request.normals(sizes, next(part.parameters())), strict=True
    ):
        family = part.g[str(size)]
        z = family.mean_value + family.log_std.exp() * noise.view(2, -1, size)
        std = torch.cat(
            [
                torch.full((m.blocks.count,), bnn.prior.std_of(m.weight) * math.sqrt(size), dtype=torch.float64)
                for m in members
            ]
        )
        for s in range(2):
            g = family.push(z[s : s + 1])[0][0]
            jacobian = torch.func.jacrev(lambda flat: family.push(flat.view(1, -1, size))[0].flatten())(z[s].flatten())  # noqa: B023
            base = torch.distributions.Normal(family.mean_value, family.log_std.exp()).log_prob(z[s]).sum()
            log_p = torch.distributions.Normal(0.0, std[:, None]).log_prob(g).sum()
            total[s] += (base - torch.linalg.slogdet(jacobian)[1] - log_p).detach()
    part.layers = tuple(
        type(layer)(layer.name, tuple(w for w in layer.weights if len(w.shape) > 1)) for layer in part.layers
    )
    _, kl = part.draw(posteriors.DrawRequest(num_draws=2, prior=prior, noise=NoiseSource(seeded)))
    torch.testing.assert_close(kl.detach(), total, rtol=1e-9, atol=1e-9)


def test_moments_of_a_flow() -> None:
    """n = 20000 draws against the 1024 fixed ones: within k = 5 joint standard errors sqrt(v / n + v / 1024)."""
    n, k = 20_000, 5.0
    bnn = wide("flow", flow_length=3)
    with torch.no_grad():
        for parameter in (parameter for family in bnn.posterior.g.values() for parameter in (family.u, family.w)):  # type: ignore[union-attr, operator]
            parameter.add_(0.7 * torch.randn_like(parameter))
        draws = bnn.draw(n, generator=generator()).materialize().weights
        mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    for name, value in draws.items():
        spread = value.var(0)
        assert bool(((value.mean(0) - mean[name]).abs() <= k * (spread / n + spread / 1024).sqrt()).all()), name
        fourth = (value - value.mean(0)).pow(4).mean(0) - spread.square()
        assert bool(((spread - variance[name]).abs() <= k * (fourth / n + fourth / 1024).sqrt()).all()), name


# -- noise per example -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("shape", [(6, 5), (5, 6), (1, 10), (10, 1)], ids=str)
def test_noise_per_example(covariance: str, shape: tuple[int, int]) -> None:
    """n = 20000 copies of one input: mean and covariance of the outputs are those of W x within k = 5 standard errors, and
    two examples are independent, where a shared draw gives them the same output."""
    n, k = 20_000, 5.0
    net = nn.Linear(shape[1], shape[0], bias=False).double()
    posterior: Any = posteriors.WalshHadamard(covariance, init_std=0.5, local_reparameterization=True)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Gaussian(0.5))
    disturb(bnn, 0.5)
    part: Any = bnn.posterior
    x = numbers(shape[1])
    with torch.no_grad():
        local = bnn.draw(1, generator=generator(), local=True)
        assert isinstance(local.weights["weight"], LocalWalshHadamardWeight)
        outputs = local[0](x.expand(n, 2, -1))
        shared = bnn.draw(1)
        assert type(shared.weights["weight"]) is Tensor
    assert bool((outputs[:, 0] - outputs[:, 1]).abs().max() < 1e-12), "noise is per example, not per position"
    y = outputs[:, 0]
    a, size, chosen = linear_map(part, "weight")
    location, covariance_g = dense_g(part, size, chosen)
    to_output = torch.einsum("oig,i->og", a.view(*shape, -1), x)
    mean, spread = to_output @ location, to_output @ covariance_g @ to_output.T
    assert bool(((y.mean(0) - mean).abs() <= k * (spread.diagonal() / n).sqrt()).all())
    products = (y - mean).unsqueeze(-1) * (y - mean).unsqueeze(-2)
    assert bool(((products.mean(0) - spread).abs() <= k * products.std(0) / math.sqrt(n) + 1e-9).all())
    pairs = (y[::2] - mean) * (y[1::2] - mean)
    assert bool((pairs.mean(0).abs() <= k * pairs.std(0) / math.sqrt(n / 2)).all())


@pytest.mark.parametrize("leaf", ["linear", "conv2d", "attention", "lstm", "tied"])
def test_local_noise_trains_every_leaf(leaf: str) -> None:
    case = CASES[leaf]
    bnn = convert("walsh_hadamard", case, local_reparameterization=True)
    first, again = (
        bnn.elbo(case.batch(), targets(case), num_data=10, num_draws=2, generator=generator(7)) for _ in range(2)
    )
    assert first.item() == again.item()
    first.backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in bnn.parameters())  # type: ignore[arg-type]


@pytest.mark.usefixtures("multiplying")
@pytest.mark.parametrize("covariance", FAMILIES)
def test_files(covariance: str, tmp_path: Path) -> None:
    bnn, x = wide(covariance), numbers(4, 5)
    bayesify.save(bnn, tmp_path / "wide.safetensors")
    loaded = bayesify.load(tmp_path / "wide.safetensors", bnn.mean_network())
    with torch.no_grad():
        first, again = (each.draw(3, generator=generator()) for each in (bnn, loaded))
        assert torch.equal(first(x), again(x))
        assert torch.equal(first.kl, again.kl)


def test_what_a_graph_can_record() -> None:
    """Draws of plain tensors only."""
    narrow, kernel = nn.Linear(8, 8), nn.Conv2d(4, 4, 3)
    for net, options, expected in (
        (narrow, {}, True),
        (narrow, {"local_reparameterization": True}, False),
        (kernel, {"local_reparameterization": True}, True),
        (nn.Linear(256, 256), {}, False),
    ):
        bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(**options))
        assert bnn.posterior.capturable == expected
        plain = all(type(value) is Tensor for value in bnn.draw(1, local=True).weights.values())
        assert plain == expected


# -- where it starts, and what it learns -----------------------------------------------------------------------------


def test_it_starts_as_an_orthogonal_matrix_as_large_as_the_network() -> None:
    net = nn.Linear(16, 16).double()
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(init_std=1e-3))
    w = bnn.posterior.mean()["weight"].detach()
    expected = net.weight.detach().square().mean() * 16 * torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(w @ w.T, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(bnn.posterior.variance()["weight"], torch.full_like(w, 1e-6))
    assert torch.equal(bnn.posterior.mean()["bias"], net.bias)
    spread = bayesify.bayesianize(net, posteriors.WalshHadamard()).posterior.variance()["weight"]
    torch.testing.assert_close(spread, torch.full_like(spread, 0.01 * net.weight.detach().square().mean().item()))
    zero = nn.Linear(4, 4)
    nn.init.zeros_(zero.weight)
    assert float(bayesify.bayesianize(zero, "walsh_hadamard").posterior.mean()["weight"].detach().abs().max()) > 0.1


@pytest.mark.parametrize("covariance", FAMILIES)
def test_a_residual_is_around_the_network(covariance: str) -> None:
    """The mean is the network, which does not train; draws differ by W alone, and the file holds the network's weights."""
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(covariance, init="residual"), likelihood="gaussian")  # type: ignore[arg-type]
    tolerance = {"rtol": 0.0, "atol": 1e-12 if covariance != "flow" else 0.02}
    for name, value in bnn.posterior.mean().items():
        torch.testing.assert_close(value, net.get_parameter(name), **tolerance)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 1).double()
    bayesify.fit(bnn, [(x, y)], epochs=3, learning_rate=0.1, progress=False)
    assert torch.equal(bnn.posterior.base["0.weight"], net[0].weight)
    first, second = bnn.draw(2).weights["0.weight"]
    assert not torch.equal(first, second)
    other = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    again = BayesianNetwork.restore(other, bnn.config(), bnn.state())
    assert torch.equal(again.draw(1, generator=generator()).weights["0.weight"],
                       bnn.draw(1, generator=generator()).weights["0.weight"])  # fmt: skip
    with pytest.raises(ValueError, match="centered on the network's weights"):
        bnn.set_to_prior()


def test_it_can_start_near_the_network() -> None:
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    near, fresh = (
        bayesify.bayesianize(net, posteriors.WalshHadamard(init=init)).posterior.mean()
        for init in ("network", "random")
    )
    for name, value in net.named_parameters():
        if value.ndim > 1:
            assert (near[name] - value).norm() < 0.85 * value.norm() < (fresh[name] - value).norm()


@pytest.mark.parametrize(
    ("covariance", "seeds"),
    [("diagonal", 1), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_an_mlp_learns_with_the_defaults(covariance: str, seeds: int) -> None:
    """A sine with noise of standard deviation 0.1, whatever the seed: the error of the mean is near the noise."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        x = torch.linspace(-2, 2, 128).unsqueeze(-1)
        y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
        net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        bnn = bayesify.bayesianize(net, posteriors.WalshHadamard(covariance), likelihood=likelihoods.Gaussian(0.01))  # type: ignore[arg-type]
        optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            (-bnn.elbo(x, y, num_data=128) / 128).backward()
            optimizer.step()
        assert float((bnn.predict(x, num_draws=16).mean - y).square().mean().sqrt()) < 0.2


def test_bad_options() -> None:
    for options, message in (
        ({"covariance": "dense"}, r"covariance='dense'; give 'diagonal', 'full' or 'flow'"),
        ({"covariance": "flow", "flow_length": 0}, r"flow_length=0; give an integer of at least 1"),
        ({"init_std": 0.0}, r"init_std=0.0; give a positive number"),
        ({"init": "zeros"}, r"init='zeros'; give 'random', 'network' or 'residual'"),
        ({"covariance": "flow", "local_reparameterization": True}, r"use covariance='diagonal' or 'full'"),
    ):
        with pytest.raises(ValueError, match=f"WalshHadamard: .*{message}"):
            posteriors.WalshHadamard(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a block of size 8192 needs .* use 'diagonal' or 'flow'"):
        bayesify.bayesianize(nn.Linear(4097, 4097, bias=False), posteriors.WalshHadamard("full"))


def test_entries_agree_with_the_reference_order() -> None:
    """The matrix view that blocks fill is the one of the dense reference."""
    bnn = convert("walsh_hadamard", CASES["transposed1d"], torch.float64)
    part: Any = bnn.posterior
    (layer,) = part.layers
    weight = layer.weights[0]
    blocks = Blocks.cover(*weight.matrix_shape)
    size = str(blocks.size)
    square = maths.materialize(part.left[size], part.g[size].mean_value, part.right[size])
    matrix = blocks.assemble(square)
    flat = part.mean()[weight.name].flatten()
    for position, (name, row, col) in enumerate(entries(layer)):
        if name == weight.name:
            assert flat[position] == matrix[row, col]


def test_f_linear_of_other_arguments_falls_back() -> None:
    weight = WalshHadamardWeight(torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 4), Blocks.cover(4, 4))
    torch.testing.assert_close(F.linear(torch.eye(4), weight), torch.eye(4))
    torch.testing.assert_close(F.linear(weight, torch.eye(4)), torch.eye(4))
    torch.testing.assert_close(weight + 0, torch.eye(4))


def test_weights_are_formed_where_tensor_cores_gain(monkeypatch):
    """On a GPU under autocast, all of a draw at once or in a layer with many rows: the same numbers, once as plain tensors."""
    from bayesify.posteriors.walsh_hadamard import blocks, posterior

    bnn = bayesify.bayesianize(nn.Sequential(nn.Linear(300, 260), nn.Linear(260, 300)), posteriors.WalshHadamard())
    x = torch.randn(5, 300)

    def outputs() -> Any:
        draws = bnn.draw(2, generator=torch.Generator().manual_seed(0))
        return draws, draws(x)

    draws, expected = outputs()
    assert isinstance(draws.weights["0.weight"], WalshHadamardWeight)
    monkeypatch.setattr(blocks, "_gains_by_forming", lambda *_: True)
    torch.testing.assert_close(outputs()[1], expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(posterior, "_forms_all", lambda *_: True)
    draws, found = outputs()
    assert not isinstance(draws.weights["0.weight"], WalshHadamardWeight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
