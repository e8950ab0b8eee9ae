"""One model served by several threads: each caller gets what it gets alone, to the bit, and nothing is changed."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors, priors
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.configuration import make_posterior
from bayesify.methods import METHODS
from bayesify.random_features import RandomFeatureGP
from bayesify.running.runner import Runner
from bayesify.training.task import TrainingTask
from bayesify.weights.catalog import catalog

X = torch.linspace(-2, 2, 36).reshape(12, 3)
Y = X[:, :1].sin()


def serve(ask: Callable[[int], Any], num_threads: int, num_calls: int) -> None:
    """Ask with the seeds of several threads at once and compare with the answers of one thread."""
    seeds = {thread: [thread * num_calls + call for call in range(num_calls)] for thread in range(num_threads)}
    want = {seed: ask(seed) for own in seeds.values() for seed in own}
    wrong: list[str] = []
    start = threading.Barrier(num_threads)

    def work(own: list[int]) -> None:
        start.wait()
        for seed in own:
            try:
                found = ask(seed)
                if not all(torch.equal(a, b) for a, b in zip(found, want[seed], strict=True)):
                    wrong.append(f"seed {seed}: other numbers")
            except Exception as error:  # whatever it is, the caller would not have had it alone
                wrong.append(f"seed {seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(own,)) for own in seeds.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def train(name: str) -> Any:
    method = METHODS[name]
    if method.extra is not None and find_spec(method.extra) is None:
        pytest.skip(method.status)
    if method.fit is None:
        posterior = make_posterior({"name": name, **method.options})
        return bayesify.bayesianize(network(), posterior, likelihood=likelihoods.Gaussian(0.1))
    noise = likelihoods.Gaussian(0.1, learn=False)
    problem = TrainingTask(network().eval(), noise, [(X, Y)], prior=priors.Neal(), num_data=12, epochs=2, seed=0)
    return method.fit(problem, **method.options)


def predictor(model: Any, x: Tensor = X, **options: Any) -> Callable[[int], Any]:
    known = inspect.signature(model.predict).parameters
    takes = "generator" in known or any(one.kind is one.VAR_KEYWORD for one in known.values())

    def ask(seed: int) -> tuple[Tensor, ...]:
        given = dict(options)
        if takes:
            given["generator"] = torch.Generator().manual_seed(seed)
        rows = x[: 1 + seed % len(x)]
        prediction = model.predict(rows, **given)
        return prediction.mean, prediction.variance

    return ask


def state_of(model: Any) -> tuple[dict[str, Tensor], list[bool], int]:
    module = model if isinstance(model, nn.Module) else getattr(model, "network", None) or getattr(model, "bnn", None)
    if not isinstance(module, nn.Module):
        module = model.draws.runner.network
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
    return copy.deepcopy(module.state_dict()), [part.training for part in module.modules()], hooks


def check_state(model: Any, before: tuple[dict[str, Tensor], list[bool], int]) -> None:
    after = state_of(model)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert before[1:] == after[1:]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name: str) -> None:
    model = train(name)
    before = state_of(model)
    serve(predictor(model), num_threads=4, num_calls=5)
    check_state(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_eight_threads(name: str) -> None:
    """8 threads x 200 predictions."""
    model = train(name)
    before = state_of(model)
    serve(predictor(model), num_threads=8, num_calls=200)
    check_state(model, before)


def laplace(**options: Any) -> Any:
    net = network().eval()
    return bayesify.Laplace(net, likelihoods.Gaussian(0.1), **options).fit([(X, Y)])


OTHERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "laplace full": lambda: (laplace(), {"method": "linearized_mc"}),
    "laplace kronecker": lambda: (laplace(covariance="kronecker"), {}),
    "laplace network": lambda: (laplace(covariance="diagonal"), {"method": "network_mc"}),
    "fixed draws": lambda: (FixedDraws(train("mean_field").draw(8).detach(), likelihoods.Gaussian(0.1)), {}),
    "temperature": lambda: (
        baselines.TemperatureScaling(train("mean_field")).fit([(X, Y)]),
        {},
    ),
    "temperature of a plain network": lambda: (
        baselines.TemperatureScaling(network(), likelihood=likelihoods.Gaussian(0.1)).fit([(X, Y)]),
        {},
    ),
    "random features": lambda: (RandomFeatureGP(3, num_features=16, likelihood=likelihoods.Gaussian(0.1)), {}),
    "function space, linearized": lambda: (
        bayesify.FunctionSpaceVI(
            bayesify.bayesianize(
                nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
                posteriors.MeanField(0.1),
                likelihood=likelihoods.Gaussian(0.1),
            )
        ),
        {"method": "linearized"},
    ),
    "without kept outputs": lambda: (train("inducing"), {"memory": 2000}),
    "several posteriors": lambda: (
        bayesify.bayesianize(
            network(),
            {
                "0": posteriors.MeanField(0.1),
                "3": posteriors.InducingWeights(4, 4),
                "*": posteriors.GlobalInducing(X[:4]),
            },
            likelihood=likelihoods.Gaussian(0.1),
        ),
        {},
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_predictors(name: str) -> None:
    model, options = OTHERS[name]()
    serve(predictor(model, **options), num_threads=4, num_calls=5)


class Plain(nn.Module):
    """Children held a second time in a plain list, a dict and a bound method; one of them twice in the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.again = self.second
        self.steps = [self.first, (self.second, {"last": self.again})]
        self.act = self.apply_act
        self.empty = nn.Sequential()

    def apply_act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if not self.training else x

    def forward(self, x: Tensor) -> Tensor:
        first, (second, rest) = self.steps
        return self.act(rest["last"](self.act(second(self.act(first(self.empty(x)))))))[:, :1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.unsqueeze(1))[0][:, -1])


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(1, 4), nn.Linear(4, 1)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.up(x.unsqueeze(-1))).mean(1))


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x.unsqueeze(1)))


NETWORKS = [Plain, Recurrent, Attends, Convolves]


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("posterior", ["mean_field", "ensemble", "inducing"])
def test_odd_networks(kind: type[nn.Module], posterior: str) -> None:
    bnn = bayesify.bayesianize(kind(), posterior, likelihood=likelihoods.Gaussian(0.1))
    before = state_of(bnn)
    serve(predictor(bnn, num_draws=4), num_threads=4, num_calls=4)
    check_state(bnn, before)


@pytest.mark.parametrize("kind", NETWORKS)
def test_laplace_of_odd_networks(kind: type[nn.Module]) -> None:
    model = bayesify.Laplace(kind().eval(), likelihoods.Gaussian(0.1), covariance="diagonal").fit([(X, Y)])
    flash = torch.backends.cuda.flash_sdp_enabled()
    serve(predictor(model), num_threads=4, num_calls=4)
    assert torch.backends.cuda.flash_sdp_enabled() == flash, "the kernels of attention are as they were"


@pytest.mark.parametrize("kind", NETWORKS)
def test_draws_called_at_once_in_both_modes(kind: type[nn.Module]) -> None:
    """Draws that a user holds, while others predict with the network that is in training mode."""
    bnn = bayesify.bayesianize(kind(), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    bnn.network.eval()
    bnn.network.training = True
    draws = bnn.draw(3)

    def ask(seed: int) -> tuple[Tensor, ...]:
        if seed % 2:
            return (bnn.predict(X, 2, generator=torch.Generator().manual_seed(seed)).mean,)
        with torch.no_grad():
            return draws(X), draws[1](X)

    serve(ask, num_threads=4, num_calls=6)
    assert bnn.network.training


def test_a_prediction_in_training_mode_is_one_of_evaluation_mode() -> None:
    """While one thread predicts, another sees the network in training mode throughout."""
    modes: set[bool] = set()
    bnn = bayesify.bayesianize(Convolves(), "mean_field", likelihood=likelihoods.Gaussian(0.1)).train()
    want = bnn.eval().predict(X, 4, generator=torch.Generator().manual_seed(0)).mean
    bnn.train()
    finished = threading.Event()

    def watch() -> None:
        while not finished.is_set():
            modes.update(module.training for module in bnn.modules())
            time.sleep(1e-4)  # let the predictions run

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(20):
        assert torch.equal(bnn.predict(X, 4, generator=torch.Generator().manual_seed(0)).mean, want)
    finished.set()
    watcher.join()
    assert modes == {True}


class Keeps(nn.Module):
    """Assigns to an attribute, to a buffer and to a child's attribute in its forward pass, and fills a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()))
        self.seen: Any = None
        self.current: nn.Module | None = None
        self.filled: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.filled.clear()
        self.filled.extend([x] * 3)
        self.seen = x.shape
        self.current = self.layer
        self.layer.calls = getattr(self.layer, "calls", 0) + 1
        return self.layer(sum(self.filled))


def test_what_a_network_keeps_itself() -> None:
    """A plain call keeps it, as the network itself would; a prediction does not."""
    bnn = bayesify.bayesianize(Keeps(), posteriors.MeanField(0.1), likelihood=likelihoods.Gaussian(0.1))
    bnn(X)
    bnn.elbo(X, Y, num_data=12)
    net: Any = bnn.network
    assert (float(net.count), net.layer.calls, net.seen) == (2, 2, X.shape)
    assert net.current is net.layer
    assert [len(part) for part in net.filled] == [12, 12, 12]
    bnn.predict(X[:4], 1)
    assert (float(net.count), net.layer.calls, net.seen) == (2, 2, X.shape)
    assert [len(part) for part in net.filled] == [12, 12, 12]
    copy.deepcopy(bnn)
    assert net.layer.weight is None, "the slot is empty again"


@pytest.mark.filterwarnings("ignore:.*changes its own attributes")
@pytest.mark.parametrize("num_draws", [1, 3])
def test_a_module_that_is_shared_later_and_a_list_that_a_pass_fills(num_draws: int) -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.keeps, self.late = nn.Identity(), Keeps(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.keeps(self.late(torch.tanh(self.early(x))))

    bnn = bayesify.bayesianize(Early(), posteriors.MeanField(0.5), likelihood=likelihoods.Gaussian(0.1))
    bnn.network.early = bnn.network.late
    serve(predictor(bnn, num_draws=num_draws), num_threads=4, num_calls=8)
    assert bnn.network.late.weight is None, "the slot is empty again"


def test_hooks_of_the_user_run() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Gaussian(0.1))
    shapes: list[Any] = []
    handle = bnn.network[1].register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    bnn(X)
    assert shapes == [(12, 4)]
    handle.remove()
    bnn(X)
    assert len(shapes) == 1


class Hooked(nn.Module):
    """Passes a value from a hook to its forward pass by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.kept = out.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x)
        return self.last(self.kept)


def test_hooks_that_are_methods_belong_to_the_copy() -> None:
    bnn = bayesify.bayesianize(Hooked(), posteriors.MeanField(0.1), likelihood=likelihoods.Gaussian(0.1)).eval()
    draws = bnn.draw(3, generator=torch.Generator().manual_seed(1))
    weights = draws.materialize().weights
    hidden = torch.einsum("soi,bi->sbo", weights["first.weight"], X) + weights["first.bias"][:, None]
    want = torch.einsum("soi,sbi->sbo", weights["last.weight"], hidden.tanh()) + weights["last.bias"][:, None]
    torch.testing.assert_close(draws(X), want)
    del bnn.network.kept  # a call of the draws keeps it, as the network itself would, and a prediction does not
    serve(predictor(bnn, num_draws=3), num_threads=3, num_calls=3)
    assert not hasattr(bnn.network, "kept")


@pytest.mark.parametrize("hook", [False, True])
def test_functions_that_hold_the_network_are_refused(hook: bool) -> None:
    """A copy of the network would run the original with its own weights, and every draw would be the same."""
    net: Any = nn.Sequential(nn.Linear(3, 1))
    if hook:
        net[0].register_forward_hook(lambda module, args, out: net[0].weight.sum() + out)
    else:
        net.function = lambda x: net[0](x)
    for make in (
        lambda: bayesify.bayesianize(net, "mean_field"),
        lambda: bayesify.Laplace(net, likelihoods.Gaussian(0.1)),
    ):
        with pytest.raises(ValueError, match="make the function a method"):
            make()


def test_a_compiled_part_runs_behind_a_lock() -> None:
    """Compiled code runs one module object, which cannot be copied."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(0.1), likelihood=likelihoods.Gaussian(0.1))
    want = predictor(bnn, num_draws=3)(1)
    bnn.network[1].compile(backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(predictor(bnn, num_draws=3)(1), want, strict=True))
    serve(predictor(bnn, num_draws=3), num_threads=3, num_calls=3)


def test_tied_weights_and_slots_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x)
            raise RuntimeError("on purpose")

    net = Fails()
    runner = Runner(net, catalog(net).weights)
    before = net.layer.weight
    with pytest.raises(RuntimeError, match="on purpose"):
        runner.call({"layer.weight": torch.zeros(1, 3)}, (X,), {})
    assert net.layer.weight is before


def test_estimators() -> None:
    sklearn = pytest.importorskip("bayesify.sklearn")
    estimator = sklearn.BayesianRegressor(hidden=(6,), epochs=3, random_state=0).fit(X.numpy(), Y[:, 0].numpy())
    global_state = torch.get_rng_state()

    def ask(seed: int) -> tuple[Tensor, ...]:
        mean, std = estimator.predict(X[: 1 + seed % 12].numpy(), return_std=True)
        return torch.from_numpy(mean), torch.from_numpy(std)

    serve(ask, num_threads=4, num_calls=5)
    assert torch.equal(torch.get_rng_state(), global_state), "a prediction does not touch the global generator"


def fitted(seed: int, kind: str) -> dict[str, Tensor]:
    data = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    torch_net = copy.deepcopy(NET)
    if kind == "swag":
        model = baselines.SWAG(torch_net, likelihoods.Gaussian(0.1), rank=2)
        model.fit(data, 2, seed=seed, progress=False)
        return {name: value.clone() for name, value in model.network.state_dict().items()}
    bnn = copy.deepcopy(BNN)
    bayesify.fit(bnn, data, epochs=2, seed=seed, progress=False)
    return {name: value.clone() for name, value in bnn.state_dict().items()}


NET = network()
BNN = bayesify.bayesianize(NET, posteriors.MeanField(0.01), likelihood=likelihoods.Gaussian(0.1))


@pytest.mark.parametrize("kinds", [("fit", "fit"), ("fit", "swag")])
def test_two_trainings_at_once_are_those_alone(kinds: tuple[str, str]) -> None:
    """Loaders shuffle by torch's global generator, and dropout uses it: the second training waits."""
    jobs = [partial(fitted, 1, kinds[0]), partial(fitted, 2, kinds[1])] * 2
    want = [job() for job in jobs]
    found: dict[int, Any] = {}

    def work(place: int) -> None:
        found[place] = jobs[place]()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, state in enumerate(want):
        assert all(torch.equal(state[name], found[place][name]) for name in state), f"training {place}"
