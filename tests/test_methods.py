"""The list of methods, and methods that other packages add by entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify
from bayesify import configuration, likelihoods, methods, posteriors
from bayesify.arguments import plugins
from bayesify.methods import METHODS, Method, all_methods, get_method


class Theirs(posteriors.MeanField):
    name = "theirs"
    title = "Theirs"
    aliases = ("their-own",)


class Twin(posteriors.MeanField):
    name = "theirs"
    aliases = ()


class Thief(posteriors.Point):
    name = "thief"
    aliases = ("mfvi",)


def train(task: Any) -> None:
    """Nothing is trained here."""


THEIR_METHOD = Method("their_method", "Their method", "Nobody 2099", "P", fit=train)
NUMBER = 3


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has the entry points of one test be names of this module."""

    def offer(*names: str) -> None:
        points = [EntryPoint(name, f"{__name__}:{name}", plugins.GROUP) for name in names]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)
        clear()

    def clear() -> None:
        plugins.plugins.cache_clear()
        methods._other_methods.cache_clear()

    yield offer
    clear()


def test_a_posterior_of_an_entry_point_is_found_by_name(install: Callable[..., None], tmp_path: Path) -> None:
    install("Theirs")
    net, x = nn.Linear(2, 1), torch.randn(3, 2)
    bnn = bayesify.bayesianize(net, "their_own", likelihood=likelihoods.Gaussian())
    assert isinstance(
        bnn.posterior.parts[0] if hasattr(bnn.posterior, "parts") else bnn.posterior, posteriors.Posterior
    )
    assert bnn.config()["posterior"]["name"] == "theirs"
    bayesify.save(bnn, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", net)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(bnn.predict(x, generator=generators[0]).mean, loaded.predict(x, generator=generators[1]).mean)
    assert get_method("theirs").posterior is Theirs
    assert list(all_methods()) == [*METHODS, "theirs"]


def test_a_method_of_an_entry_point_is_found_by_name(install: Callable[..., None]) -> None:
    install("THEIR_METHOD")
    assert get_method("Their-Method") is THEIR_METHOD
    remedy = r"'their_method' is not a posterior of a network; use bayesify.methods.get_method\('their_method'\).fit\("
    with pytest.raises(ValueError, match=remedy):
        bayesify.bayesianize(nn.Linear(2, 1), "their_method")


def test_names_of_the_library_load_no_entry_point(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(plugins, "entry_points", lambda group: pytest.fail("entry points were read"))
    bayesify.bayesianize(nn.Linear(2, 1), "mfvi")
    assert get_method("nuts").name == "hmc"


def test_what_cannot_be_loaded_is_skipped_by_name(install: Callable[..., None]) -> None:
    install("no_such_thing", "Theirs")
    with pytest.warns(UserWarning, match=r"'no_such_thing = .*' could not be loaded and is skipped: AttributeError"):
        assert list(all_methods()) == [*METHODS, "theirs"]
    assert list(all_methods()) == [*METHODS, "theirs"]  # once, and without a second warning


def test_what_is_no_method_is_skipped_by_name(install: Callable[..., None]) -> None:
    install("NUMBER")
    with pytest.warns(
        UserWarning, match=r"'NUMBER = .*' is skipped, because int is neither a Method nor a subclass of Posterior"
    ):
        assert all_methods() == METHODS


def test_a_taken_name_is_an_error_that_names_both(install: Callable[..., None]) -> None:
    install("Thief")
    with pytest.raises(
        ValueError, match=r"'mfvi' of the entry point 'Thief = .*' already belongs to bayesify's 'mean_field'"
    ):
        all_methods()
    install("Theirs", "Twin")
    with pytest.raises(
        ValueError, match=r"'theirs' of the entry point 'Twin = .*' already belongs to the entry point 'Theirs = "
    ):
        all_methods()
    with pytest.raises(
        ValueError, match=r"'theirs' is the name of several posteriors, Theirs = .* and Twin = .*; rename one"
    ):
        bayesify.bayesianize(nn.Linear(2, 1), "theirs")


def test_names_and_aliases_are_different() -> None:
    names = [name for method in METHODS.values() for name in (method.name, *method.aliases)]
    assert len(names) == len({name.lower().replace("-", "_") for name in names})
    assert list(posteriors.REGISTRY) == [name for name, method in METHODS.items() if method.posterior is not None]


def test_a_posterior_of_a_method_from_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name and its aliases; a class without a name disturbs nobody."""

    class Nameless(posteriors.Posterior):
        pass

    theirs = methods.Method("theirs", "Theirs", "Doe 2031", "P", posteriors.MeanField, aliases=("their_own",))
    found = (("a = there:theirs", theirs), ("b = there:Nameless", Nameless))
    monkeypatch.setattr(configuration, "plugins", lambda: found)
    for name in ("theirs", "their-own"):
        assert configuration.find_posterior(name) is posteriors.MeanField
    with pytest.raises(ValueError, match="did you mean 'theirs'"):
        configuration.find_posterior("thers")
