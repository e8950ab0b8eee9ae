"""Inducing weights against the dense augmented prior: draws, marginals, bounds, starts, counts."""

import math

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors, priors
from bayesify.maths.constraints import positive
from bayesify.maths.matheron import Augmented, conditional_draw, factorize, noise_shapes

SIZES = [(2, 3, 3, 4), (5, 2, 3, 4), (2, 6, 4, 3), (4, 4, 2, 2)]  # rows, cols of U; outputs, inputs of W


def dense_joint(z_r: Tensor, z_c: Tensor, d_r: Tensor, d_c: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of the covariance of (vec W, vec U) under the augmented prior, columns stacked (eq. 6)."""
    psi_r, psi_c = z_r @ z_r.T + torch.diag(d_r**2), z_c @ z_c.T + torch.diag(d_c**2)
    ww = sigma**2 * torch.eye(z_r.shape[1] * z_c.shape[1], dtype=z_r.dtype)
    return ww, sigma * torch.kron(z_c.T, z_r.T), torch.kron(psi_c, psi_r)


def vec(matrix: Tensor) -> Tensor:
    return matrix.mT.flatten(-2)


def random_parts(m_r: int, m_c: int, d_out: int, d_in: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(m_r + 10 * m_c)
    shapes = [(m_r, d_out), (m_c, d_in), (m_r,), (m_c,), (m_r, m_c)]
    z_r, z_c, d_r, d_c, u = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return z_r, z_c, d_r.abs() + 0.3, d_c.abs() + 0.3, u


@pytest.mark.thin(2)
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_draws_have_the_conditional_mean_and_covariance(size, scale):
    z_r, z_c, d_r, d_c, u = random_parts(*size)
    sigma = 0.7
    ww, wu, uu = dense_joint(z_r, z_c, d_r, d_c, sigma)
    mean = wu @ torch.linalg.solve(uu, vec(u))
    covariance = scale**2 * (ww - wu @ torch.linalg.solve(uu, wu.T))
    factors = factorize([Augmented([z_r[None]], [z_c[None]], d_r[None], d_c[None])])[0]
    whitened = torch.linalg.solve_triangular(factors.row_tril[0], u, upper=False)
    whitened = torch.linalg.solve_triangular(factors.col_tril[0], whitened.T, upper=False).T
    n = 200_000
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(*shape, dtype=u.dtype, generator=generator) for shape in noise_shapes(factors, n)]
    with torch.no_grad():
        (drawn,) = conditional_draw(
            factors,
            whitened.expand(1, n, -1, -1),
            torch.tensor([scale]).double(),
            torch.tensor([sigma]).double(),
            noise,
        )
    flat = vec(drawn[0])
    error = covariance.diagonal().sqrt() / math.sqrt(n)
    assert ((flat.mean(0) - mean).abs() <= 5 * error).all()  # 5 standard errors of a mean of n draws
    centered = flat - mean
    variances = covariance.diagonal()
    spread = ((torch.outer(variances, variances) + covariance**2) / n).sqrt()  # of an empirical Gaussian covariance
    assert ((centered.T @ centered / n - covariance).abs() <= 5 * spread).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_draw_is_linear_in_its_noise_with_exactly_the_conditional_covariance(size):
    """The same covariance without Monte Carlo: push each unit of noise through the rule."""
    z_r, z_c, d_r, d_c, _ = random_parts(*size)
    ww, wu, uu = dense_joint(z_r, z_c, d_r, d_c, 0.7)
    factors = factorize([Augmented([z_r[None]], [z_c[None]], d_r[None], d_c[None])])[0]
    shapes = noise_shapes(factors, 1)
    lengths = [math.prod(shape) for shape in shapes]
    total = sum(lengths)
    units = torch.eye(total, dtype=z_r.dtype).split(lengths, dim=1)
    # each unit vector of noise is one draw
    noise = [part.reshape(total, *shape[2:])[None] for part, shape in zip(units, shapes, strict=True)]
    zero = torch.zeros(1, total, size[0], size[1], dtype=z_r.dtype)
    (columns,) = conditional_draw(factors, zero, torch.ones(1).to(z_r), torch.tensor([0.7], dtype=z_r.dtype), noise)
    root = vec(columns[0])  # [noise, P]
    torch.testing.assert_close(root.T @ root, ww - wu @ torch.linalg.solve(uu, wu.T), rtol=0, atol=1e-8)


def trained(posterior, net=None, prior=None):
    """A bound posterior away from its start, in float64."""
    torch.manual_seed(1)
    bnn = bayesify.bayesianize(
        net or nn.Linear(4, 3).double(), posterior, prior=prior, likelihood=likelihoods.Gaussian()
    )
    with torch.no_grad():
        for name, parameter in bnn.posteriors.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) + (5.0 if "raw" in name else 0.0))
    return bnn


def dense_kl(mean: Tensor, covariance: Tensor, prior: Tensor) -> Tensor:
    trace = torch.linalg.solve(prior, covariance).trace()
    quadratic = mean @ torch.linalg.solve(prior, mean)
    return 0.5 * (trace + quadratic - mean.numel() + torch.logdet(prior) - torch.logdet(covariance))


def u_moments(family, index: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of vec U, columns stacked, from each family's definition."""
    mean = vec(family.mean()[index])
    if family.name == "diagonal":
        return mean, torch.diag(vec(family.std()[index].square()))
    if family.name == "matrix":
        rows, cols = family.trils()
        return mean, torch.kron(cols[index] @ cols[index].T, rows[index] @ rows[index].T)
    tril = family.scale_tril()[index]
    order = torch.arange(tril.shape[0]).view(family.rows, family.cols).T.flatten()
    return mean, (tril @ tril.T)[order][:, order]


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("q", ["diagonal", "matrix", "full"])
def test_kl_is_that_of_the_joint_over_weights_and_inducing_weights(q, whiten):
    bnn = trained(posteriors.InducingWeights(2, 3, q=q, whiten=whiten), prior=priors.Neal())
    part, family = bnn.posterior.augmentations[0], bnn.posterior.inducing[0]
    d_r, d_c = positive(part.raw_d_row)[0], positive(part.raw_d_col)[0]
    ww, wu, uu = dense_joint(part.z_row["0"][0], part.z_col["0"][0], d_r, d_c, sigma=0.5)  # 1 / sqrt(4)
    mean, covariance = u_moments(family, 0)
    if whiten:  # U = L_r U_w L_c^T
        root = torch.kron(
            torch.linalg.cholesky(part.z_col["0"][0] @ part.z_col["0"][0].T + torch.diag(d_c**2)),
            torch.linalg.cholesky(part.z_row["0"][0] @ part.z_row["0"][0].T + torch.diag(d_r**2)),
        )
        mean, covariance = root @ mean, root @ covariance @ root.T
    gain = wu @ torch.linalg.inv(uu)
    conditional = part.scale()[0] ** 2 * (ww - gain @ wu.T)
    joint_mean = torch.cat((gain @ mean, mean))
    cross = gain @ covariance
    joint = torch.cat((torch.cat((conditional + cross @ gain.T, cross), 1), torch.cat((cross.T, covariance), 1)))
    prior = torch.cat((torch.cat((ww, wu), 1), torch.cat((wu.T, uu), 1)))
    torch.testing.assert_close(
        bnn.kl(), dense_kl(joint_mean, joint, prior), rtol=1e-6, atol=1e-6
    )  # two routes through inverses
    # and the marginal of W has the mean and variance that the posterior reports
    values = {"weight": bnn.posterior.mean()["weight"], "bias": bnn.posterior.mean()["bias"]}
    torch.testing.assert_close(vec(bnn.posterior.layers[0].to_matrix(values)), gain @ mean, rtol=1e-6, atol=1e-8)
    spread = bnn.posterior.layers[0].to_matrix(bnn.posterior.variance())
    torch.testing.assert_close(vec(spread), (conditional + cross @ gain.T).diagonal(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{}, {"q": "matrix", "whiten": False}, {"q": "full"}, {"shared": (3, 2)}, {"rows": 9}]
)
def test_the_marginal_of_w_at_the_prior_is_the_prior(options):
    bnn = trained(posteriors.InducingWeights(**{"rows": 2, "cols": 3, **options}), prior=priors.Gaussian(0.7))
    bnn.set_to_prior()
    assert abs(bnn.kl().item()) < 1e-9
    for value in bnn.posterior.variance().values():
        torch.testing.assert_close(value, torch.full_like(value, 0.49), rtol=0, atol=1e-8)
    for value in bnn.posterior.mean().values():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-12)


def test_conditional_kl_follows_equation_8_and_its_function_space_form_equation_45():
    bnn = trained(posteriors.InducingWeights(2, 3, q="ensemble", function_space_kl=True))
    scale = bnn.posterior.augmentations[0].scale()[0]
    expected = 3 * 5 * (0.5 * scale**2 - scale.log() - 0.5)  # the bias is an input column
    torch.testing.assert_close(bnn.kl(), expected)
    x, y = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for num_data, beta in ((2, 2 / 5), (50, 1.0)):
        _, kl = bnn.elbo_terms(x, y, num_data=num_data)
        torch.testing.assert_close(kl[0], beta * expected)


def test_caps_of_zero_are_point_estimates():
    no_spread = trained(posteriors.InducingWeights(2, 3, max_lambda=0.0, max_std=0.0))
    draws = no_spread.draw(3).weights["weight"]
    assert torch.equal(draws[0], draws[1])
    u = no_spread.posterior.inducing[0].mean()
    expected = -torch.distributions.Normal(0.0, 1.0).log_prob(u).sum()
    torch.testing.assert_close(no_spread.kl(), expected)


@pytest.mark.parametrize("kind", [(0.5, "diagonal"), (0.05, "diagonal")])
def test_caps_hold(kind):
    cap, q = kind
    bnn = trained(posteriors.InducingWeights(2, 3, q=q, max_lambda=cap, max_std=cap))
    assert bnn.posterior.augmentations[0].scale().max() <= cap
    assert bnn.posterior.inducing[0].std().max() <= cap


@pytest.mark.parametrize(
    "options", [{}, {"whiten": False}, {"fit_to_layer": True}, {"q": "matrix"}, {"rows": 2}, {"balanced": True}]
)
def test_start_from_a_network_is_its_best_low_rank_approximation(options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Conv1d(1, 4, 3), nn.ConvTranspose1d(4, 2, 3), nn.Conv2d(6, 4, 3, bias=False)
    ).double()
    wanted = {"rows": 4, "cols": 5, **options}
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(init="network", **wanted))
    values = {name: parameter.detach() for name, parameter in net.named_parameters()}
    means = bnn.posterior.mean()
    for layer in bnn.posterior.layers:
        p, s, qt = torch.linalg.svd(layer.to_matrix(values), full_matrices=False)
        rank = min(wanted["rows"], wanted["cols"], len(s))
        best = p[:, :rank] @ torch.diag(s[:rank]) @ qt[:rank]
        torch.testing.assert_close(layer.to_matrix(means), best, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(6, 4, (3, 2), bias=False),
        nn.Conv3d(6, 8, (2, 3, 2), bias=False, groups=2),
        nn.ConvTranspose2d(8, 4, (3, 2), bias=False, groups=2),
    ],
    ids=lambda conv: type(conv).__name__,
)
@pytest.mark.parametrize("q", ["diagonal", "full", "ensemble"])
def test_a_balanced_kernel_is_drawn_as_a_linear_layer_of_its_size(conv, q):
    outputs, first = conv.out_channels, conv.kernel_size[0]
    linear = nn.Linear(conv.weight.numel() // (outputs * first), outputs * first, bias=False)
    prior, options = priors.Gaussian(0.7), {"rows": 3, "cols": 3, "q": q, "init": "random"}
    bnn = trained(posteriors.InducingWeights(**options, balanced=True), conv.double(), prior)
    expected = trained(posteriors.InducingWeights(**options), linear.double(), prior)
    assert bnn.kl() == expected.kl()
    groups, kernel = conv.groups, conv.kernel_size

    def as_kernel(matrix: Tensor) -> Tensor:
        """[*batch, c_out k_1, c_in/g k_2 ...] -> [*batch, c_out, c_in/g, k_1, k_2, ...], or as a transposed kernel."""
        found = (
            matrix.unflatten(-2, (outputs, first))
            .unflatten(-1, (-1, *kernel[1:]))
            .movedim(1 - len(kernel) - 2, -len(kernel))
        )
        if isinstance(conv, nn.ConvTranspose2d):
            found = torch.cat([part.transpose(-3, -4) for part in found.chunk(groups, -4)], -4)
        return found

    draws, others = (one.draw(3, generator=torch.Generator().manual_seed(2)).weights for one in (bnn, expected))
    torch.testing.assert_close(draws["weight"], as_kernel(others["weight"]), rtol=0, atol=0)
    for found, wanted in zip(
        (bnn.posterior.mean(), bnn.posterior.variance()),
        (expected.posterior.mean(), expected.posterior.variance()),
        strict=True,
    ):
        torch.testing.assert_close(found["weight"], as_kernel(wanted["weight"]), rtol=0, atol=0)


def test_only_kernels_without_bias_that_become_smaller_are_balanced():
    layers = {
        "kernel": (nn.Conv2d(8, 8, 3, bias=False), (24, 24)),
        "bias": (nn.Conv2d(8, 8, 3), (8, 73)),
        "few inputs": (nn.Conv2d(3, 16, 3, bias=False), (16, 27)),
        "depthwise": (nn.Conv2d(8, 8, 3, groups=8, bias=False), (8, 9)),
        "one axis": (nn.Conv1d(8, 8, 3, bias=False), (8, 24)),
        "one position": (nn.Conv2d(8, 8, 1, bias=False), (8, 8)),
        "linear": (nn.Linear(8, 8, bias=False), (8, 8)),
    }
    net = nn.ModuleDict({name: layer for name, (layer, _) in layers.items()})
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(4, 4, balanced=True))
    found = {layer.name: (layer.rows, layer.cols) for layer in bnn.posterior.layers}
    assert found == {name: size for name, (_, size) in layers.items()}


@pytest.mark.parametrize("q", ["diagonal", "matrix", "full", "ensemble"])
@pytest.mark.parametrize("size", [(32, 32), (32, 16), (32, 8), (8, 32), (3, 3)], ids=str)
@pytest.mark.parametrize("channels", [(64, 64), (21, 60), (32, 16), (4, 8)], ids=str)
def test_balanced_matrices_never_store_more_numbers(channels, size, q):
    def count(balanced: bool) -> int:
        posterior = posteriors.InducingWeights(*size, q=q, init="random", balanced=balanced)
        return bayesify.count_parameters(bayesify.bayesianize(nn.Conv2d(*channels, 3, bias=False), posterior))

    assert count(True) <= count(False)


@pytest.mark.parametrize("fit_to_layer", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("q", ["diagonal", "matrix", "full", "ensemble"])
@torch.no_grad()
def test_every_family_starts_around_the_network_with_a_tenth_of_its_size(q, whiten, fit_to_layer):
    """The variances of 7 to 120 weights by 8 members have a standard error of 15 % at most, by Gaussians they are exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    made = posteriors.InducingWeights(21, 21, q=q, members=8, whiten=whiten, fit_to_layer=fit_to_layer)
    bnn = bayesify.bayesianize(net, made)
    for layer in ("0", "2"):
        values = [net.get_parameter(f"{layer}.{name}") for name in ("weight", "bias")]
        size = torch.cat([value.flatten() for value in values]).square().mean().sqrt()
        for name, value in zip(("weight", "bias"), values, strict=True):
            torch.testing.assert_close(bnn.posterior.mean()[f"{layer}.{name}"], value, rtol=1e-6, atol=1e-6)
        spread = bnn.posterior.variance()[f"{layer}.weight"].mean().sqrt() / size
        loose = q == "diagonal" and not whiten  # a diagonal has none of the prior's correlations
        assert (0.03 if loose else 0.09) < spread < 0.115


@torch.no_grad()
def test_a_prior_that_correlates_positions_starts_with_a_tenth_of_the_weights_size():
    """Given the prior's mean factor; what it draws comes on top. The mean of 1,000 variances of 576 weights, 5 standard errors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3))
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(), prior=priors.SpatialInverseWishart())
    factor = bnn.posterior.bound_prior.factor["0.weight"]
    assert abs(float(factor.square().sum() / 9) - 1) > 0.05  # this matters
    torch.manual_seed(1)
    lone = bnn.posterior.draw(posteriors.DrawRequest(num_draws=1000, prior=bnn.posterior.bound_prior))[0]["0.weight"]
    size = torch.cat([value.flatten() for value in net.parameters()]).square().mean().sqrt()
    assert abs(float(lone.var(0).mean().sqrt() / size) / 0.1 - 1) < 0.02


def test_an_ensemble_takes_one_member_in_all_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(2, 2, q="ensemble", members=3, max_lambda=0.0))
    weights = bnn.draw(30).weights
    pairs = zip(weights["0.weight"], weights["1.weight"], strict=True)
    assert len({(one.sum().item(), two.sum().item()) for one, two in pairs}) == 3  # mixed members would give up to 9


def test_shared_inducing_weights_correlate_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(2, 2, shared=(1, 1), max_lambda=1e-3))
    with torch.no_grad():
        bnn.posterior.inducing[0].raw_std.fill_(3.0)
        weights = bnn.draw(4000, generator=torch.Generator().manual_seed(0)).weights
    flat = torch.cat([value.flatten(1) for value in weights.values()], dim=1)
    across = torch.corrcoef(flat.T)[:4, 4:].abs().max()
    assert across > 0.9  # one number drives both layers; independent layers would show about 1 / sqrt(4000)


COUNTS = {  # M: FFG-U, Ensemble-U with 5 members; Ritter et al. 2021, table of parameter counts
    16: (1_384_662, 1_426_134),
    32: (2_771_446, 2_937_334),
    64: (5_710_902, 6_374_454),
    128: (12_253_366, 14_907_574),
    256: (27_992_502, 38_609_334),
}


@pytest.fixture(scope="module")
def resnet50():
    return models.resnet50()


@pytest.mark.parametrize(
    "size",
    [
        16,
        64,
        pytest.param(32, marks=pytest.mark.slow),
        pytest.param(128, marks=pytest.mark.slow),
        pytest.param(256, marks=pytest.mark.slow),
    ],
)
def test_parameter_counts_of_resnet50(resnet50, size):
    assert bayesify.count_parameters(resnet50) == 23_520_842
    for q, expected in zip(("diagonal", "ensemble"), COUNTS[size], strict=True):
        bnn = bayesify.bayesianize(
            resnet50, posteriors.InducingWeights(size, size, q=q, fit_to_layer=False, init="random")
        )
        assert bayesify.count_parameters(bnn) == expected
        assert bnn.summary().after == expected


def test_parameter_count_of_the_mean_field_resnet50(resnet50):
    assert bayesify.count_parameters(bayesify.bayesianize(resnet50, "mean_field")) == 46_988_564


def test_layers_of_equal_size_are_drawn_as_if_alone():
    """A network's draw equals each layer's own, given the same parameters and noise scale: grouping changes nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5)).double()
    bnn = trained(posteriors.InducingWeights(2, 2), net)
    n = 20_000
    with torch.no_grad():
        draws = bnn.draw(n, generator=torch.Generator().manual_seed(0))
    mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    for name, value in draws.weights.items():
        error = (variance[name] / n).sqrt()
        assert ((value.mean(0) - mean[name]).abs() <= 5 * error).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0"),
        ({"cols": -1}, "cols=-1"),
        ({"members": 0}, "members=0"),
        ({"q": "dense"}, "q='dense'"),
        ({"max_lambda": -1.0}, "max_lambda=-1.0"),
        ({"q": "ensemble", "max_std": 0.1}, "max_std"),
        ({"init": "svd"}, "init='svd'"),
        ({"shared": (2,)}, "shared"),
        ({"shared": (0, 2)}, "shared=.*each entry an integer of at least 1"),
        ({"shared": (2, 2), "whiten": False}, "whiten"),
        ({"shared": (2, 2), "fit_to_layer": True}, "fit_to_layer"),
        ({"balanced": True, "function_space_kl": True}, "balanced=False"),
    ],
)
def test_bad_options_are_refused_when_given(options, message):
    with pytest.raises(ValueError, match=message):
        posteriors.InducingWeights(**options)


@pytest.mark.parametrize("options", [{}, {"max_std": 0}, {"q": "matrix"}, {"q": "full"}, {"shared": (3, 2)}], ids=str)
def test_the_covariance_of_u_is_that_of_its_draws(options):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(2, 3, **options))
    with torch.no_grad():
        for parameter in bnn.posterior.inducing.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    found = bnn.posterior.inducing_covariance()
    assert list(found) == (["shared"] if "shared" in options else ["0", "1", "2"])
    size = 6
    family = bnn.posterior.inducing[0]
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *family.noise_shape())
    columns = (family.draw(basis.expand(family.count, *basis.shape), None) - family.mean().unsqueeze(1)).flatten(2)
    for value, column in zip(found.values(), columns, strict=True):
        torch.testing.assert_close(value, column.mT @ column)


def test_an_ensemble_has_no_covariance_of_u():
    bnn = bayesify.bayesianize(nn.Linear(3, 4), posteriors.InducingWeights(2, 2, q="ensemble"))
    with pytest.raises(ValueError, match="mixture of points"):
        bnn.posterior.inducing_covariance()


def test_a_full_covariance_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="at most 2048"):
        bayesify.bayesianize(nn.Linear(100, 100), posteriors.InducingWeights(64, 64, q="full"))


def test_the_file_of_the_bayesian_resnet50_is_a_quarter_of_the_deterministic_one(resnet50, tmp_path):
    bayesify.save(resnet50, tmp_path / "network")
    bnn = bayesify.bayesianize(resnet50, posteriors.InducingWeights(64, 64, init="random"))
    bayesify.save(bnn, tmp_path / "bayesian")
    sizes = {name: (tmp_path / name).stat().st_size for name in ("network", "bayesian")}
    assert sizes["bayesian"] <= 0.246 * sizes["network"]


@pytest.mark.parametrize("q", ["diagonal", "ensemble"])
def test_the_summary_says_what_fitting_u_to_small_layers_would_save(q):
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
    whole, fitted = (
        bayesify.bayesianize(net, posteriors.InducingWeights(8, 8, q=q, fit_to_layer=fit)) for fit in (False, True)
    )
    remarks = [row.remark for row in whole.summary().rows if "fit_to_layer" in row.remark]
    saved = sum(int(remark.split()[-2].replace(",", "")) for remark in remarks)
    assert len(remarks) == 2
    assert saved == bayesify.count_parameters(whole) - bayesify.count_parameters(fitted)
    assert not any(row.remark for row in fitted.summary().rows)
