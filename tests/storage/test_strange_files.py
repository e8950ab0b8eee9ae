"""Files from strangers: whatever a header says, `load` gives the content or a clear `ValueError`, within 1 GiB and 5 s."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import mutate
from torch import Tensor, nn

import bayesify
from bayesify import baselines, likelihoods, posteriors
from bayesify.deep_gp import DeepGP
from bayesify.predictor import Predictor
from bayesify.storage import tensor_files

X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
SECRET = "hunter2"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).eval()


def bayesian(posterior: Any) -> Callable[[], Any]:
    return lambda: bayesify.bayesianize(net(), posterior, likelihood=likelihoods.Gaussian(0.1))


def laplace() -> Any:
    return bayesify.Laplace(net(), likelihoods.Gaussian(0.1)).fit([(X, Y)])


def swag() -> Any:
    made = baselines.SWAG(net(), "gaussian", rank=2)
    for _ in range(3):
        made.collect(net())
    return made


MODELS: dict[str, Callable[[], Any]] = {
    "mean_field": bayesian("mean_field"),
    "inducing": bayesian(posteriors.InducingWeights(rows=2, cols=2)),
    "ensemble": bayesian(posteriors.Ensemble(2)),
    "rank_one": bayesian(posteriors.RankOne(components=2)),
    "two": bayesian({"0": posteriors.MatrixNormal(), "Linear": posteriors.WalshHadamard()}),
    "global_inducing": bayesian(posteriors.GlobalInducing(X[:4])),
    "full_covariance": bayesian("full_covariance"),
    "laplace": laplace,
    "swag": swag,
    "draws": lambda: baselines.FixedDraws(bayesian("mean_field")().draw(3).detach(), likelihoods.Gaussian(0.1)),
    "scaled": lambda: baselines.TemperatureScaling(bayesian("mean_field")()),
    "function_space": lambda: bayesify.FunctionSpaceVI(bayesian("mean_field")()),
    "deep_gp": lambda: DeepGP(X, Y, num_inducing=4),
    "module": net,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Header and tensors of a file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for name, make in MODELS.items():
        bayesify.save(make(), folder / name)
        found[name] = tensor_files.read(folder / name, "model")
    return found


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def attempt(path: Path, network: nn.Module | None) -> Any:
    """What `load` gives or the error, once the limits held."""
    measured = Path("/proc/self/clear_refs").exists()
    if measured:
        Path("/proc/self/clear_refs").write_text("5")
    before, start = (peak_mib() if measured else 0.0), time.process_time()
    try:
        result: Any = bayesify.load(path, network)
    except ValueError as error:
        result = error
    assert time.process_time() - start < 5
    assert not measured or peak_mib() - before < 1024
    if isinstance(result, ValueError):
        assert str(path) in str(result)
        assert len(str(result)) < 1000
        assert SECRET not in str(result)
    return result


def check(stored: Any, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    secret = folder / "secret.json"
    secret.write_text(json.dumps({"posterior": SECRET, "name": SECRET}))
    name = chance.choice(list(MODELS))
    header, tensors = copy.deepcopy(stored[name])
    path = folder / "m.safetensors"
    if chance.random() < 0.2:  # bytes, without the checksum
        tensor_files.write(path, "model", header, tensors)
        raw = bytearray(path.read_bytes())
        for _ in range(chance.choice((1, 1, 5))):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(bytes(raw[: chance.randrange(len(raw))] if chance.random() < 0.2 else raw))
        expected = stored[name]
    else:
        mutate(chance, header, tensors, secret)
        tensor_files.write(path, chance.choice(("model",) * 9 + ("checkpoint",)), header, tensors)
        expected = None
    result = attempt(path, net() if name != "deep_gp" or chance.random() < 0.1 else None)
    if not isinstance(result, ValueError):
        assert isinstance(result, (Predictor, nn.Module))
        if expected is not None:  # nothing that matters was hit
            found = result.state() if isinstance(result, Predictor) else result.state_dict()
            for key, value in found.items():
                if key in expected[1]:
                    assert torch.equal(value, expected[1][key])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 330))])
def test_mutated_files(stored: Any, tmp_path: Path, seed: int) -> None:
    check(stored, tmp_path, seed)


LARGE = {
    "inducing": (("posterior", "rows"), 20_000),
    "rank_one": (("posterior", "components"), 10**7),
    "ensemble": (("posterior", "members"), 10**6),
    "deep_gp": (("widths",), [2, 20_000, 20_000, 1]),
}


@pytest.mark.parametrize("name", LARGE)
def test_nothing_larger_than_the_file_is_built(
    stored: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a twentieth of the operations that are allowed in addition to those of the file's size, which took seconds."""
    monkeypatch.setattr("bayesify.storage.save_load.SPARE_CALLS", 1_000)
    header, tensors = copy.deepcopy(stored[name])
    (*before, last), value = LARGE[name]
    holder = header["config"]
    for key in before:
        holder = holder[key]
    holder[last] = value
    if name == "inducing":
        holder["cols"] = value
    tensor_files.write(tmp_path / "m", "model", header, tensors)
    result = attempt(tmp_path / "m", net())
    assert isinstance(result, ValueError)
    assert "far more numbers than the file contains" in str(result) or "size mismatch" in str(result)


@pytest.mark.parametrize("where", ["config", "posterior"])
def test_no_other_file_is_opened(stored: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"posterior": SECRET, "name": SECRET}))
    header, tensors = copy.deepcopy(stored["mean_field"])
    if where == "config":
        header["config"] = str(secret)
    else:
        header["config"]["posterior"] = str(secret)
    tensor_files.write(tmp_path / "m", "model", header, tensors)
    opened: list[str] = []
    original = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *args, **more: opened.append(str(self)) or original(self, *args, **more)
    )
    with pytest.raises(ValueError, match="is not a dict with an entry") as raised:
        bayesify.load(tmp_path / "m", net())
    assert SECRET not in str(raised.value)
    assert str(secret) not in opened


def test_the_version_is_under_the_checksum_and_the_first_one_loads(
    stored: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    header, tensors = copy.deepcopy(stored["mean_field"])
    monkeypatch.setattr(tensor_files, "FORMAT_VERSION", 1)
    tensor_files.write(tmp_path / "old", "model", header, tensors)
    monkeypatch.undo()
    assert isinstance(bayesify.load(tmp_path / "old", net()), bayesify.BayesianNetwork)
    raw = (tmp_path / "old").read_bytes()
    assert raw.count(b'"format_version":"1"') == 1
    (tmp_path / "old").write_bytes(raw.replace(b'"format_version":"1"', b'"format_version":"2"'))
    with pytest.raises(ValueError, match="checksum"):
        bayesify.load(tmp_path / "old", net())


ODD_VALUES = (
    *(None, True, -1, float("nan"), "", "x", [], [1], [[]], [{}], ["x", "x"], {}, {"x": 1}, {"x": "x"}, {"x": []}),
    *({"$tensor": "x"}, {"$tensor": []}, {"$dict": 3}, {"$dict": [[[], 1]]}, {"$tuple": 3}, {"$counter": [[{}, 1]]}),
)


@pytest.mark.parametrize("name", ["mean_field", "module"])
def test_every_field_of_a_header_may_be_odd(stored: Any, tmp_path: Path, name: str) -> None:
    header, tensors = stored[name]
    path = tmp_path / "m.safetensors"
    for field in header:
        others = {key: entry for key, entry in header.items() if key != field}
        for changed in (others, *({**others, field: value} for value in ODD_VALUES)):
            tensor_files.write(path, "model", changed, tensors)
            attempt(path, net())
