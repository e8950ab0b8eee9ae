"""Models on disk: what comes back, what is refused, what is never changed."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.methods import METHODS
from bayesify.predictor import Predictor
from bayesify.storage import serializers, tensor_files
from bayesify.training import ModelStack
from bayesify.weights.module_state import fingerprint, restore_module


class Tied(nn.Module):
    """Tied weights, buffers, a weight left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.table.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(self.table(index))).tanh())


def small(kind: str = "plain") -> nn.Module:
    if kind == "tied":
        return Tied()
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make(posterior=None, seed=0, **options):
    torch.manual_seed(seed)
    options = {"likelihood": likelihoods.Categorical()} | options
    return bayesify.bayesianize(small(), posterior or posteriors.MeanField(), **options)


def state(module: nn.Module) -> dict:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


NAMES = [method.name for method in METHODS.values() if method.posterior is not None]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in NAMES for kind in ("plain", "tied") if (name, kind) != ("global_inducing", "tied")],
)  # which takes no embedding
def test_every_posterior_comes_back(tmp_path, name, kind):
    """Parameters, buffers and predictions, bit for bit; from a network with other weights."""
    path = tmp_path / "model.safetensors"
    x = torch.randint(7, (9,)) if kind == "tied" else torch.randn(9, 4)
    options = {"name": name, **METHODS[name].options}
    bnn = bayesify.bayesianize(small(kind), options, likelihood="categorical").eval()
    bayesify.save(bnn, path)
    net = small(kind).eval()
    before = state(net)
    loaded = bayesify.load(path, net)
    assert type(loaded) is bayesify.BayesianNetwork
    assert equal(state(loaded), state(bnn))
    assert loaded.config() == bnn.config()
    assert equal(state(net), before)
    predictions = [each.predict(x, 5, generator=torch.Generator().manual_seed(0)).probs for each in (bnn, loaded)]
    assert torch.equal(*predictions)


def test_a_dict_of_selectors_prior_and_learned_noise(tmp_path):
    choice = {"0": posteriors.FullCovariance(init_std=0.1), "Linear": posteriors.MeanField(init_std=0.2, max_std=0.5)}
    bnn = make(choice, likelihood=likelihoods.Gaussian([0.1, 0.2, 0.3]), prior=priors.Neal(2.0))
    with torch.no_grad():
        bnn.likelihood.raw_noise.add_(0.7)
    bayesify.save(bnn, tmp_path / "m.safetensors")
    loaded = bayesify.load(tmp_path / "m.safetensors", small())
    assert torch.equal(loaded.likelihood.noise, bnn.likelihood.noise)
    assert loaded.prior.scale == 2.0
    assert loaded.config() == bnn.config()


def test_keys_and_header_on_disk(tmp_path):
    path = tmp_path / "m.safetensors"
    bayesify.save(make(), path)
    with safe_open(path, "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    weights = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert names == {f"posteriors.0.{part}.{name}" for part in ("mean_value", "raw_std") for name in weights}
    header = json.loads(metadata["header"])
    assert header["library_version"] == bayesify.__version__
    assert header["type"] == "BayesianNetwork"
    assert header["config"]["posterior"]["name"] == "mean_field"
    assert header["fingerprint"]["0.weight"] == "[6, 4] float32"
    assert metadata["format_version"] == "2"


def test_a_plain_network_and_tied_weights_stored_once(tmp_path):
    net, path = Tied(), tmp_path / "net.safetensors"
    bayesify.save(net, path)
    with safe_open(path, "pt") as file:
        assert "out.weight" not in set(file.keys())
    other = Tied()
    before = state(other)
    loaded = bayesify.load(path, other)
    assert type(loaded) is Tied
    assert equal(state(loaded), state(net))
    assert loaded.out.weight is loaded.table.weight
    assert equal(state(other), before)
    weights = sum(value.numel() * value.element_size() for value in {id(v): v for v in state(net).values()}.values())
    assert os.path.getsize(path) < weights + 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_come_back(tmp_path, dtype):
    bnn = bayesify.bayesianize(small().to(dtype), "mean_field", likelihood="categorical")
    bayesify.save(bnn, tmp_path / "m.safetensors")
    loaded = bayesify.load(tmp_path / "m.safetensors", small().to(dtype), map_location="cpu")
    assert equal(state(loaded), state(bnn))
    with pytest.raises(ValueError, match=r"another network: .* float32 in the given network"):
        bayesify.load(tmp_path / "m.safetensors", small())


def test_mode_and_generator_are_the_callers(tmp_path):
    bnn = make(posteriors.KTied(2))
    bayesify.save(bnn, tmp_path / "m.safetensors")
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    bayesify.save(bnn, tmp_path / "m.safetensors")
    net = small().eval()
    torch.manual_seed(5)
    assert not bayesify.load(tmp_path / "m.safetensors", net).training
    assert torch.rand(()) == expected


def broken_files(whole: bytes):
    length = int.from_bytes(whole[:8], "little")
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    header = whole.replace(b"mean_field", b"mean_yield")
    newer = whole.replace(b'"format_version":"2"', b'"format_version":"9"')
    return {
        "cut in the tensors": (whole[:-10], "truncated"),
        "cut in the header": (whole[: length // 2], "truncated"),
        "cut to nothing": (b"", "truncated"),
        "one bit in a tensor": (bytes(flipped), "checksum"),
        "one letter in the header": (header, "checksum"),
        "a newer format": (newer, "format 9"),
        "another kind of file": (b"{}" * 200, "truncated|of another kind"),
    }


@pytest.mark.parametrize("what", list(broken_files(b"\0" * 40)))
def test_damaged_files_are_refused(tmp_path, what):
    path = tmp_path / "m.safetensors"
    bayesify.save(make(), path)
    content, message = broken_files(path.read_bytes())[what]
    assert content != path.read_bytes()
    path.write_bytes(content)
    net = small()
    before = state(net)
    with pytest.raises(ValueError, match=message):
        bayesify.load(path, net)
    assert equal(state(net), before)


def test_every_cut_and_every_flipped_byte_is_found(tmp_path):
    """Every eleventh place of the header, and fifty lengths and places over the file."""
    path = tmp_path / "m.safetensors"
    bayesify.save(make(), path)
    whole, net = path.read_bytes(), small()
    spread = {index * (len(whole) - 1) // 49 for index in range(50)}
    for place in sorted(spread | set(range(0, 8 + int.from_bytes(whole[:8], "little"), 11))):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=str(path)):
                bayesify.load(path, net)


def test_files_of_others_and_of_other_networks(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not written by bayesify"):
        bayesify.load(path, small())
    with pytest.raises(FileNotFoundError, match="no such file"):
        bayesify.load(tmp_path / "nothing.safetensors", small())
    bayesify.save(make(), path)
    for other, message in (
        (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), r"0.weight is \[6, 4\] float32 in the file"),
        (
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)),
            "2.bias .* missing in the given network",
        ),
        (nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3)), "module 1 is Tanh in the file and PReLU"),
    ):
        with pytest.raises(ValueError, match=message):
            bayesify.load(path, other)
    with pytest.raises(TypeError, match="give the plain network"):
        bayesify.load(path, make())
    with pytest.raises(TypeError, match=r"net=.net.; give a torch\.nn\.Module"):
        bayesify.load(path, "net")


def test_paths_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        bayesify.save(make(), tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        bayesify.save(make(), tmp_path / "no" / "m.safetensors")
    with pytest.raises(
        TypeError, match=r"ModelStack is a stack of several models; save each model that unstack\(\) returns"
    ):
        bayesify.save(ModelStack([make(), make()]), tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match="int cannot be stored"):
        bayesify.save(3, tmp_path / "m.safetensors")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    bayesify.save(make(), path)
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        bayesify.save(make(seed=1), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="an open file can be replaced")
def test_who_reads_the_old_file_reads_it_to_the_end(tmp_path):
    path = tmp_path / "m.safetensors"
    bayesify.save(make(), path)
    before = path.read_bytes()
    with open(path, "rb") as reader:
        start = reader.read(100)
        bayesify.save(make(seed=1), path)
        assert start + reader.read() == before
    assert path.read_bytes() != before


def test_other_types_register_themselves(tmp_path, monkeypatch):
    class Shifted(Predictor):
        """Something that predicts and is not a module; its configuration holds a tensor and a tuple."""

        likelihood = output = None

        def __init__(self, net, shift, pair):
            self.net, self.shift, self.pair = net, shift, pair

        def predict(self, x, num_draws=None, *, generator=None, memory=None):
            return self.net(x) + self.shift

        def config(self):
            return {"shift": self.shift, "pair": self.pair}

        def state(self):
            return self.net.state_dict()

        @classmethod
        def restore(cls, net, config, state):
            return cls(restore_module(net, state), **config)

        def fingerprint(self):
            return fingerprint(self.net)

    model = Shifted(small(), torch.randn(3), (1, 2.5))
    with pytest.raises(TypeError, match=r"Shifted cannot be stored; the known types are .*register_predictor"):
        bayesify.save(model, tmp_path / "m.safetensors")
    monkeypatch.setitem(serializers.STORED_CLASSES, "Shifted", Shifted)
    with pytest.raises(ValueError, match="'Shifted' is already registered"):
        serializers.register_predictor(Shifted)
    with pytest.raises(TypeError, match=r"inherits from bayesify\.predictor\.Predictor"):
        serializers.register_predictor(dict)
    bayesify.save(model, tmp_path / "m.safetensors")
    loaded = bayesify.load(tmp_path / "m.safetensors", small())
    x = torch.randn(5, 4)
    assert torch.equal(loaded.predict(x), model.predict(x))
    assert loaded.pair == (1, 2.5)
    del serializers.STORED_CLASSES["Shifted"]
    with pytest.raises(ValueError, match="contains a 'Shifted', a type that is unknown"):
        bayesify.load(tmp_path / "m.safetensors", small())


def test_parameters_that_are_not_finite_are_neither_stored_nor_loaded(tmp_path):
    """Buffers may be: a mask of minus infinity is one."""
    path, net = tmp_path / "m.safetensors", small()
    net.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    for model in (bnn, net):
        bayesify.save(model, path)
        whole = path.read_bytes()
        loaded = bayesify.load(path, net)
        mask = (loaded.network if model is bnn else loaded).mask
        assert torch.equal(mask, net.mask)
        name, parameter = next(iter(model.named_parameters()))
        value = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[0] = float("nan")
        with pytest.raises(ValueError, match=r"save: .*weight is not finite"):
            bayesify.save(model, path)
        assert path.read_bytes() == whole
        header, tensors = tensor_files.read(path, "model")
        stored = name.replace("/", ".")
        tensors[stored] = tensors[stored] * float("inf")
        tensor_files.write(path, header.pop("kind"), header, tensors)
        with pytest.raises(ValueError, match=r"weight is not finite; use an earlier copy"):
            bayesify.load(path, net)
        with torch.no_grad():
            parameter.copy_(value)
