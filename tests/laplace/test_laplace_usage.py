"""Laplace as a user meets it: errors before long computations, storage, precision, processes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import Laplace, likelihoods, models, subnetwork
from bayesify.laplace import Sampled
from bayesify.running.memory import parse_bytes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))


def data(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(count, 2), torch.randint(3, (count,)))]


CATEGORICAL = likelihoods.Categorical()

WRONG: dict[str, tuple[Any, str]] = {
    "not_a_module": (lambda: Laplace(3, CATEGORICAL), "give a torch.nn.Module"),  # type: ignore[arg-type]
    "structure": (lambda: Laplace(network(), CATEGORICAL, covariance="dense"), "'full', 'diagonal', 'kronecker'"),  # type: ignore[arg-type]
    "curvature": (lambda: Laplace(network(), CATEGORICAL, curvature="hessian"), "'ggn' or 'empirical'"),  # type: ignore[arg-type]
    "precision": (
        lambda: Laplace(network(), CATEGORICAL, prior_precision=0.0),
        "prior_precision=0.0 is not a positive number; give a positive",
    ),
    "memory": (lambda: Laplace(network(), CATEGORICAL, memory="lots"), "such as '1GiB'"),
    "no_likelihood": (lambda: Laplace(network(), None), "likelihood=None; give a Likelihood"),  # type: ignore[arg-type]
    "subset_name": (lambda: Laplace(network(), CATEGORICAL, "half"), "'all', 'last_layer'"),
    "marginal": (
        lambda: Laplace(network(), CATEGORICAL, covariance="diagonal", marginal=True),
        "marginal=True does not work with covariance='diagonal'; use covariance='full'",
    ),
    "dropout": (lambda: Laplace(nn.Sequential(nn.Linear(2, 3), nn.Dropout()).train(), CATEGORICAL), r"net\.eval\(\)"),
    "batch_norm": (
        lambda: Laplace(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train(), CATEGORICAL),
        r"net\.eval\(\)",
    ),
    "empty": (lambda: subnetwork.from_indices([]), "give at least one"),
    "size_zero": (lambda: subnetwork.largest_variance(0), "size=0"),
    "share": (lambda: subnetwork.random(1.5), "give an integer number of weights"),
    "repeated": (lambda: subnetwork.from_indices([1, 1]), "appears twice"),
    "too_large": (lambda: Laplace(network(), CATEGORICAL, subnetwork.random(40)).fit(data()), "39 trainable weights"),
    "index": (
        lambda: Laplace(network(), CATEGORICAL, subnetwork.from_indices([39])).fit(data()),
        "index 39 is out of range",
    ),
    "unknown_name": (lambda: Laplace(network(), CATEGORICAL, ["1.weight"]).fit(data()), "no parameter '1.weight'"),
    "empty_mask": (
        lambda: Laplace(network(), CATEGORICAL, {"0.bias": torch.zeros(6, dtype=torch.bool)}).fit(data()),
        "the mask selects no weight",
    ),
    "budget": (lambda: Laplace(network(), CATEGORICAL, "all", memory=1000).fit(data()), "choose at most 9 weights"),
    "not_fitted": (lambda: Laplace(network(), CATEGORICAL).predict(torch.randn(2, 2)), r"call fit\(loader\) first"),
    "no_data": (lambda: Laplace(network(), CATEGORICAL).fit([]), "no examples"),
    "no_target": (lambda: Laplace(network(), CATEGORICAL).fit([{"x": torch.randn(3, 2)}]), "no target"),
    "labels": (lambda: Laplace(network(), CATEGORICAL).fit([(torch.randn(3, 2), torch.tensor([0, 1, 3]))]), "label 3"),
    "nan": (
        lambda: Laplace(network(), CATEGORICAL).fit([(torch.full((3, 2), torch.nan), torch.zeros(3).long())]),
        "nan",
    ),
    "kronecker_part": (
        lambda: Laplace(network(), CATEGORICAL, subnetwork.random(5), "kronecker").fit(data()),
        "needs whole weight tensors",
    ),
    "method": (
        lambda: Laplace(network(), CATEGORICAL).fit(data()).predict(torch.randn(2, 2), method="mc"),
        "'network_mc'",
    ),  # type: ignore[arg-type]
    "no_validation": (
        lambda: Laplace(network(), CATEGORICAL).fit(data()).tune_prior_precision(method="validation"),
        "needs loader=",
    ),
    "unnamed_layer": (
        lambda: Laplace(network(), CATEGORICAL, prior_precision={"0": 1.0}).fit(data()),
        "no entry for 2.weight",
    ),
}


WRONG |= {
    "bayesian": (
        lambda: Laplace(bayesify.bayesianize(network(), "mean_field"), CATEGORICAL),
        "mean_network",
    ),
    "half": (lambda: Laplace(network().half(), CATEGORICAL), "float16"),
    "subset_number": (lambda: Laplace(network(), CATEGORICAL, 5), "a list of parameter names"),
    "size_nan": (lambda: subnetwork.largest_variance(float("nan")), "subnetwork.largest_variance: size=nan"),
    "examples": (lambda: subnetwork.largest_variance(3, num_examples=2.5), "give an integer of at least 1"),  # type: ignore[arg-type]
    "scores": (lambda: subnetwork.from_mask(torch.rand(39)), "True and False"),
    "gap": (lambda: subnetwork.posterior_gap(-torch.eye(3), torch.tensor([True, False, True])), "negative variance"),
    "gap_indices": (lambda: subnetwork.posterior_gap(torch.eye(3), torch.tensor([0, 1, 2])), "from_indices"),
    "typo": (
        lambda: Laplace(network(), CATEGORICAL, prior_precision={"typo": 1.0, "*": 2.0}),
        "'typo', which matches no",
    ),
    "negative_weights": (
        lambda: Laplace(network(), CATEGORICAL).fit([(*data()[0], -torch.ones(20))]),
        "negative or non-finite number",
    ),
    "factors": (
        lambda: Laplace(nn.Linear(600, 2), CATEGORICAL, covariance="kronecker", memory="1MiB").fit(
            [(torch.randn(3, 600), torch.zeros(3).long())]
        ),
        "Kronecker factors of 1 layers take",
    ),
    "width": (lambda: Laplace(network(), CATEGORICAL).fit(data()).predict(torch.randn(3, 5)), "do not fit the network"),
    "draws": (
        lambda: Laplace(network(), CATEGORICAL).fit(data()).predict(torch.randn(3, 2), 0, method="linearized_mc"),
        "num_draws=0",
    ),
    "joint": (
        lambda: (
            Laplace(network(), CATEGORICAL, memory="100kB")
            .fit(data())
            .output_covariance(torch.randn(90, 2), joint=True)
        ),
        "give fewer examples",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_to_do(name: str) -> None:
    action, words = WRONG[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        action()


def test_frozen_weights() -> None:
    net = network()
    net[0].weight.requires_grad_(False)
    assert Laplace(net, CATEGORICAL).fit(data()).subset.names == ("0.bias", "2.weight", "2.bias")
    with pytest.raises(ValueError, match="frozen"):
        Laplace(net, CATEGORICAL, ["0.weight"]).fit(data())
    with pytest.raises(ValueError, match="frozen"):
        Laplace(net, CATEGORICAL, {"0.weight": torch.ones(6, 2, dtype=torch.bool)}).fit(data())


def test_indefinite_precision_is_named() -> None:
    laplace = Laplace(network(), CATEGORICAL).fit(data())
    laplace.posterior.curvature.sub_(100 * torch.eye(39))
    with pytest.raises(ValueError, match="not positive definite"):
        laplace.covariance_matrix()


def test_training_mode_is_fine_without_dropout_and_batch_norm() -> None:
    net = network().train()
    laplace = Laplace(net, CATEGORICAL).fit(data())
    assert net.training
    assert laplace.predict(torch.randn(2, 2)).probs.shape == (2, 3)


def test_dicts_are_read_like_fit_reads_them() -> None:
    x, y = data()[0]
    plain = Laplace(network(), CATEGORICAL).fit([(x, y)])
    named = Laplace(network(), CATEGORICAL).fit([{"x": x, "labels": y}])
    torch.testing.assert_close(plain.covariance_matrix(), named.covariance_matrix())


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "marginal"])
def test_saving(structure: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"covariance": structure} if structure != "marginal" else {"marginal": True}
    subset = "all" if structure == "kronecker" else subnetwork.random(9)
    net, x = network(), torch.randn(5, 2)
    laplace = Laplace(net, CATEGORICAL, subset, **options).fit(data())
    laplace.tune_prior_precision(method="evidence")
    bayesify.save(laplace, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)))
    assert isinstance(loaded, Laplace)
    torch.testing.assert_close(loaded.predict(x).probs, laplace.predict(x).probs)
    torch.testing.assert_close(loaded.covariance_matrix(), laplace.covariance_matrix())
    torch.testing.assert_close(loaded.log_evidence(), laplace.log_evidence())
    assert loaded.subset.names == laplace.subset.names


def refit_options() -> dict[str, tuple[dict[str, Any], nn.Module, Any]]:
    """Options whose defaults depend on the data: arguments of `Laplace`, a network, and a function that makes data."""

    def numbers(count: int) -> list[tuple[Tensor, Tensor]]:
        x = data(count)[0][0]
        return [(x, x[:, :1].sin() + 0.3 * x[:, 1:])]

    def sequence(*sizes: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(*sizes[1:]))

    found, confident = likelihoods.Gaussian(), network()
    found.set_noise(0.3)
    with torch.no_grad():
        confident[2].weight.mul_(20)
    return {
        "full": ({"likelihood": CATEGORICAL}, confident, data),
        "last_layer": ({"likelihood": CATEGORICAL, "subset": "last_layer"}, network(), data),
        "sampled": ({"likelihood": CATEGORICAL, "covariance": Sampled(4, 3)}, network(), data),
        "budget": ({"likelihood": CATEGORICAL, "memory": 6000}, sequence(2, 30, 3), data),
        "noise": ({"likelihood": likelihoods.Gaussian()}, sequence(2, 6, 1), numbers),
        "trained_noise": ({"likelihood": found}, sequence(2, 6, 1), numbers),
        "given": ({"likelihood": CATEGORICAL, "prior_precision": 3.0, "link": "bridge"}, network(), data),
    }


@pytest.mark.filterwarnings("ignore:Laplace.fit")
@pytest.mark.parametrize("kind", refit_options())
def test_a_loaded_approximation_shows_and_chooses_what_the_original_does(kind: str, tmp_path: Path) -> None:
    options, net, read = refit_options()[kind]
    laplace, (x, y) = Laplace(net, **options).fit(read(40)), read(9)[0]
    bayesify.save(laplace, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", net)
    assert isinstance(loaded, Laplace)
    assert repr(loaded) == repr(laplace)
    before = laplace.prior_precision
    for one in (laplace, loaded):
        one.fit(read(8))
    assert repr(loaded) == repr(laplace)
    assert loaded.prior_precision == laplace.prior_precision
    assert loaded.link == laplace.link
    assert torch.equal(loaded.predict(x).log_prob(y), laplace.predict(x).log_prob(y))
    assert torch.equal(loaded.covariance_matrix(), laplace.covariance_matrix())
    assert (laplace.prior_precision == before) is (kind in ("given", "trained_noise", "budget"))


def test_a_tuned_precision_stays_after_loading(tmp_path: Path) -> None:
    laplace = Laplace(network(), CATEGORICAL).fit(data())
    laplace.set_prior_factor(7.0)
    wanted = laplace.prior_precision
    bayesify.save(laplace, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", network())
    assert isinstance(loaded, Laplace)
    assert loaded.fit(data()).prior_precision == wanted


def test_files_without_remarks_and_choices_load() -> None:
    laplace, x = Laplace(network(), CATEGORICAL).fit(data()), torch.randn(5, 2)
    config = {name: value for name, value in laplace.config().items() if name not in ("remarks", "choices")}
    loaded = Laplace.restore(network(), config | {"link": laplace.link}, laplace.state())
    torch.testing.assert_close(loaded.predict(x).probs, laplace.predict(x).probs)


def test_bfloat16_network() -> None:
    net = network()
    x, y = data()[0]
    half = Laplace(net.bfloat16(), CATEGORICAL).fit([(x.bfloat16(), y)])
    plain = Laplace(network(), CATEGORICAL).fit([(x, y)])
    assert half.posterior.curvature.dtype == torch.float32
    scale = plain.posterior.curvature.abs().max()
    # bfloat16 has 8 bits: products of rounded activations and gradients are off by a few percent of the largest entry
    assert (half.posterior.curvature - plain.posterior.curvature).abs().max() < 0.05 * scale


def test_a_resnet_with_batch_norm() -> None:
    torch.manual_seed(0)
    net = models.resnet18(variant="cifar", num_classes=3, width=16).eval()
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    laplace = Laplace(net, CATEGORICAL, subnetwork.largest_variance(50, num_examples=2), memory="200MiB").fit([(x, y)])
    assert laplace.subset.size == 50
    assert laplace.predict(x).probs.shape == (4, 3)
    last = Laplace(net, CATEGORICAL, "last_layer").fit([(x, y)])
    assert last.subset.names == ("fc.weight", "fc.bias")


def test_a_long_batch_is_reduced_under_the_budget() -> None:
    laplace = Laplace(network(), CATEGORICAL).fit(data())
    x = torch.randn(500, 2)
    small = laplace.predict(x, memory="10kB")
    torch.testing.assert_close(small.probs, laplace.predict(x).probs)
    torch.testing.assert_close(small.mutual_information, laplace.predict(x).mutual_information)
    with pytest.raises(RuntimeError, match="exceed the memory budget"):
        _ = small.outputs


class Scaled(nn.Module):
    """A network that owns a parameter itself, and has a head that the likelihood is not about."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(2, 4), nn.Linear(4, 3), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).tanh()
        return {"logits": self.scale * self.head(hidden), "other": self.other(hidden)}


class Hidden(Scaled):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": nn.functional.linear(self.body(x).tanh(), self.head.weight)}


def test_the_last_layer_is_the_outputs_own() -> None:
    laplace = Laplace(Scaled(), CATEGORICAL, "last_layer").fit(data())
    assert laplace.subset.names == ("head.weight", "head.bias")
    attention = nn.Sequential(
        nn.Linear(2, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Linear(4, 3)
    )
    x, y = data()[0]
    assert Laplace(attention, CATEGORICAL, "last_layer").fit([(x[:, None], y[:, None])]).subset.names == (
        "2.weight",
        "2.bias",
    )
    with pytest.raises(ValueError, match=r"head\.weight is used outside of a call"):
        Laplace(Hidden(), CATEGORICAL, "last_layer").fit(data())


class Centered(nn.Module):
    """Examples mix below the weights that are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Noisy(Centered):
    def forward(self, x: Tensor) -> Tensor:
        thinned = nn.functional.dropout(x.repeat(1, 50), 0.5)  # [B, 100]: two masks that agree are out of the question
        return self.head(thinned.reshape(len(x), 50, 2).mean(1))


@pytest.mark.parametrize("kind", [Centered, Noisy])
def test_mixing_and_random_networks_are_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="depends on the other examples of the batch, or is random"):
        Laplace(kind(), CATEGORICAL).fit(data())


def test_tuning_is_what_the_precision_says_and_the_next_fit_keeps() -> None:
    laplace = Laplace(network(), CATEGORICAL, prior_precision={"0": 2.0, "*": 1.0}).fit(data())
    factor = laplace.tune_prior_precision(method="evidence")
    assert laplace.prior_precision == pytest.approx({"0": 2.0 * factor, "*": factor})
    before = laplace.covariance_matrix()
    torch.testing.assert_close(laplace.fit(data()).covariance_matrix(), before, rtol=1e-4, atol=1e-5)


def test_a_prediction_draws_nothing_from_the_global_generator() -> None:
    laplace = Laplace(network(), CATEGORICAL).fit(data())
    state = torch.get_rng_state()
    prediction = laplace.predict(torch.randn(2, 2, generator=torch.Generator().manual_seed(0)))
    assert bool((prediction.mutual_information >= 0).all())
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_nothing_depends_on() -> None:
    class Partly(nn.ModuleDict):
        def forward(self, x: Tensor) -> Any:
            return self["used"](x)

    net = Partly({"used": nn.Linear(2, 3), "idle": nn.Linear(2, 3)})
    laplace = Laplace(net, CATEGORICAL, ["idle.weight"], prior_precision=2.0).fit(data())
    torch.testing.assert_close(laplace.covariance_matrix(), 0.5 * torch.eye(6))


def test_bytes() -> None:
    assert parse_bytes("1GiB") == 2**30
    assert parse_bytes("1.5 MB") == 1_500_000
    assert parse_bytes(7) == 7


def _part(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, y = data()[0]
    parts = [(x[rank::2], y[rank::2])]
    for structure in ("full", "diagonal", "kronecker"):
        laplace = Laplace(network(), CATEGORICAL, covariance=structure).fit(parts)
        if rank == 0:
            torch.save((laplace.covariance_matrix(), laplace.log_evidence()), Path(folder) / f"{structure}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_add_up(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threaded = torch.accelerator.is_available() or torch.get_num_threads() > 1  # a fork of threads may wait forever
    method = "spawn" if threaded else "fork"  # which loads nothing again
    torch.multiprocessing.start_processes(_part, (port, str(tmp_path)), nprocs=2, start_method=method)
    for structure in ("full", "diagonal", "kronecker"):
        alone = Laplace(network(), CATEGORICAL, covariance=structure).fit(data())
        covariance, evidence = torch.load(tmp_path / f"{structure}.pt")
        torch.testing.assert_close(covariance, alone.covariance_matrix(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(evidence, alone.log_evidence(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gaussian", "given noise", "categorical", "weighted"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_an_untrained_network_is_reported(kind, subset):
    """The message gives the error of the network and that of a constant guess, both over all batches."""
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    signal = 3 * x[:, :1] + 5
    y = (signal[:, 0] > 5).long() if kind == "categorical" else signal
    counts = 1 + (torch.arange(200) % 3).double() if kind == "weighted" else torch.ones(200).double()
    net = nn.Linear(5, 2 if kind == "categorical" else 1)
    likelihood = {"given noise": likelihoods.Gaussian(4.0), "weighted": "gaussian"}.get(kind, kind)
    batches = [(x[:50], y[:50], counts[:50]), (x[50:], y[50:], counts[50:])]
    if kind != "weighted":
        batches = [batch[:2] for batch in batches]
    with torch.no_grad():
        if kind == "categorical":
            shares = y.bincount() / len(y)
            seen = nn.functional.cross_entropy(net(x), y), -(shares * shares.log()).sum()
        else:
            mean = (counts @ y[:, 0].double()) / counts.sum()
            seen = [(counts @ part[:, 0].double().square() / counts.sum()).sqrt() for part in (net(x) - y, y - mean)]
    numbers = re.escape(f"{seen[0]:.3g}") + ".*gives " + re.escape(f"{seen[1]:.3g}")
    with pytest.warns(UserWarning, match=f"learned little: its .*{numbers}; train the network first"):
        laplace = Laplace(net, likelihood, subset).fit(batches)
    assert [finding.code for finding in laplace.findings] == ["learned_little"]
    with torch.no_grad():
        net.weight.zero_()[-1, 0], net.bias[:] = 3.0, 5.0 if kind != "categorical" else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Laplace(net, likelihood, subset).fit(batches).findings


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_second_fit_chooses_a_default_precision_again(subset):
    """The precision follows the unit of the new targets. A precision that was tuned stays."""
    torch.manual_seed(0)
    x, net = torch.randn(200, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        y = net(x) + 0.1 * torch.randn(200, 1)
    expected = Laplace(net, "gaussian", subset).fit([(x, y)])
    laplace = Laplace(net, "gaussian", subset).fit([(x, 100 * y)]).fit([(x, y)])
    assert laplace.prior_precision == expected.prior_precision
    assert torch.equal(laplace.predict(x).std, expected.predict(x).std)
    laplace.tune_prior_precision()
    tuned = laplace.prior_precision
    assert laplace.fit([(x, 100 * y)]).prior_precision == tuned != expected.prior_precision
