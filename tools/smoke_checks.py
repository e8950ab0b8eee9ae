"""Checks of an installed bayesify outside its checkout, without extras and with each extra alone.

`python -m tools.smoke` copies this file into an empty folder and runs it there in an empty environment:
`python smoke_checks.py` for the package without extras, `python smoke_checks.py sklearn` for one extra.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors


def data() -> tuple[Tensor, Tensor]:
    """A small regression: inputs [40, 1] and targets [40, 1]."""
    x = torch.linspace(-1, 1, 40).unsqueeze(-1)
    return x, torch.sin(3 * x)


def bayesian_network() -> bayesify.BayesianNetwork:
    """A small network with a posterior, not trained."""
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    return bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Gaussian(noise=0.1))


def loader() -> DataLoader[Any]:
    """Batches of the small regression."""
    return DataLoader(TensorDataset(*data()), batch_size=20)


def command(*arguments: str) -> str:
    """Output of the command `bayesify` of this environment."""
    script = Path(sys.executable).parent / "bayesify"
    return subprocess.run([str(script), *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def check_package() -> None:
    """The installed package is the one in use; Laplace, saving and loading, and the command line work."""
    assert bayesify.__file__ is not None
    assert Path(bayesify.__file__).is_relative_to(sys.prefix), bayesify.__file__
    assert bayesify.__version__ == metadata.version("bayesify")
    x, y = data()
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(noise=0.1)).fit(loader())
    prediction = laplace.predict(x)
    assert prediction.mean.shape == (40, 1)
    assert bool((prediction.std > 0).all())
    bayesify.save(laplace, "laplace.safetensors")
    torch.testing.assert_close(bayesify.load("laplace.safetensors", net).predict(x).mean, prediction.mean)
    bayesify.fit(bayesian_network(), loader(), epochs=2)
    assert "Usage: bayesify" in command("--help")
    assert command("--version").strip() == bayesify.__version__
    assert "mean_field" in command("methods")
    missing = subprocess.run([sys.executable, "-c", "import bayesify.sklearn"], stderr=subprocess.PIPE, text=True)
    assert "pip install 'scikit-learn>=" in missing.stderr, missing.stderr


def double(job: int) -> dict[str, int]:
    """A job for the engines of `run_jobs`."""
    return {"value": 2 * job}


def check_engine(engine: str) -> None:
    """An engine runs two jobs."""
    run_jobs = import_module("bayesify.scale_out").run_jobs
    found = run_jobs(double, {"a": 1, "b": 2}, f"jobs-{engine}", engine=engine, workers=2, progress=False)
    assert found == {"a": {"value": 2}, "b": {"value": 4}}


def check_metrics() -> None:
    """A score of torchmetrics."""
    x, y = data()
    score = import_module("bayesify.adapters").RMSE()
    score.update(bayesian_network().predict(x), y)
    assert float(score.compute()) > 0


def check_train() -> None:
    """Two processes train together."""
    devices = import_module("bayesify.training").Devices(2, "cpu", launch="fork")
    bayesify.fit(bayesian_network(), loader(), epochs=1, device=devices)


def check_report() -> None:
    """The command `demo` writes its report."""
    path = command("demo", "--quick", "--methods", "point,mean_field", "--out", "report").splitlines()[-1].strip()
    assert list(Path("report").glob("*.html")), path


def check_reference() -> None:
    """A short chain of the No-U-Turn sampler."""
    draws = import_module("bayesify.baselines").nuts(bayesian_network(), *data(), num_draws=4, num_warmup=4)
    assert len(draws) == 4


def check_gp() -> None:
    """A Gaussian process with inducing points."""
    x, _ = data()
    process = import_module("bayesify.random_features").InducingPointGP(x[:5])
    assert process.predict(x).mean.shape == (40, 1)


def check_sklearn() -> None:
    """An estimator of scikit-learn."""
    x, y = data()
    estimator = import_module("bayesify.sklearn").BayesianRegressor(method="laplace")
    assert estimator.fit(x.numpy(), y.squeeze(-1).numpy()).predict(x.numpy()).shape == (40,)


def check_compare() -> None:
    """The commands `fit` and `predict` take a CSV file."""
    lines = [f"{value:.3f},{3 * value:.3f}" for value in torch.linspace(-1, 1, 80).tolist()]
    Path("table.csv").write_text("\n".join(["a,b", *lines, ""]))
    command("fit", "table.csv", "--target", "b", "--quick", "--out", "model")
    command("predict", "model", "table.csv", "--out", "predictions.csv")
    assert len(Path("predictions.csv").read_text().splitlines()) == 81


def check_lightning() -> None:
    """A module of Lightning."""
    assert import_module("bayesify.adapters").BayesianModule(bayesian_network()) is not None


def check_arviz() -> None:
    """Draws as inference data."""
    found = import_module("bayesify.adapters").to_inference_data(bayesian_network(), num_draws=4)
    assert "posterior" in found.groups()


def check_onnx() -> None:
    """Draws as an ONNX file."""
    import_module("bayesify.adapters").export_onnx(bayesian_network(), "model.onnx", data()[0], num_draws=4)
    assert Path("model.onnx").stat().st_size > 0


def check_rivals() -> None:
    """The packages that `compare` runs next to bayesify."""
    for package in ("lightgbm", "catboost", "ngboost", "quantile_forest"):
        import_module(package)


def check_transformers() -> None:
    """The trainer of Hugging Face models."""
    assert import_module("bayesify.adapters").BayesianTrainer is not None


def check_lora() -> None:
    """Low-rank adapters under a posterior."""
    import_module("peft")
    assert import_module("bayesify.adapters").bayesianize_lora is not None


def check_botorch() -> None:
    """Draws as a model of BoTorch."""
    model = import_module("bayesify.adapters").BoTorchModel(bayesian_network(), num_draws=4)
    assert model.posterior(data()[0]).mean.shape == (40, 1)


CHECKS: dict[str, Callable[[], None]] = {
    "metrics": check_metrics,
    "train": check_train,
    "report": check_report,
    "reference": check_reference,
    "gp": check_gp,
    "sklearn": check_sklearn,
    "compare": check_compare,
    "scale": lambda: check_engine("local"),
    "dask": lambda: check_engine("dask"),
    "ray": lambda: check_engine("ray"),
    "lightning": check_lightning,
    "arviz": check_arviz,
    "onnx": check_onnx,
    "rivals": check_rivals,
    "transformers": check_transformers,
    "lora": check_lora,
    "botorch": check_botorch,
}
"""The check of each extra; `all` is the union of others, and `dev` is for the checkout."""

if __name__ == "__main__":
    torch.manual_seed(0)
    CHECKS[sys.argv[1]]() if sys.argv[1:] else check_package()
