"""Programs write their settings before they train, and continue with these settings only."""

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bayesify_papers.catalog import CATALOG
from bayesify_papers.shared import records, sources
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.subnetwork import rotated_mnist, toy

from bayesify.datasets import corruptions, images, uci

RESTARTED = {
    "function_space.toy",
    "inducing_weights.parameters",
    "walsh_hadamard.approximability",
    "walsh_hadamard.transform_time",
}
"""Programs that never resume."""

OTHER_USES = {"out", "evaluate", "merge"}
"""Options for another folder, or for another use than training, like every option without a value."""

FREE = {"data", "device", "workers", "systems", "methods", "models", "datasets", "seeds"}
"""Options that any run may change, because they widen it or place it."""

OWN_FREE = {
    "function_space.fashion": {"ablation"},
    "global_inducing.cifar": {"priors", "train"},
    # A bound with more draws replaces a bound with fewer draws.
    "global_inducing.deep_linear": {"widths", "depths", "draws"},
    "global_inducing.uci": {"priors"},
    # The grid replaces the caps.
    "inducing_weights.fashion": {"max_lambda", "max_std", "ensemble_max_lambda", "mean_field_max_std"},
    "inducing_weights.pruning": {"seed"},
    "subnetwork.uci": {"kinds", "splits"},
    "walsh_hadamard.classification": {"layers", "widths"},
    "walsh_hadamard.deep_regression": {"widths"},
    "walsh_hadamard.random_features": {"functions", "covariances", "blocks"},
}
ON_CPU = ["--device", "cpu:0"]
ARGUMENTS = {
    "global_inducing.uci": ["--models", "gi"],
    **{f"inducing_weights.{name}": ON_CPU for name in ("ablation", "classification", "fashion", "pruning")},
}
"""Arguments for which every option counts. On the device `cpu`, the precision would always be float32."""

RESUMED = sorted({experiment.module for experiment in CATALOG.values()} - RESTARTED)


class Begun(Exception):
    """Raised in place of the first training run."""


def changed(action: argparse.Action) -> list[str]:
    """Another value of an option, as arguments."""
    flag, usual = action.option_strings[0], action.default
    if isinstance(action, argparse.BooleanOptionalAction):
        return [action.option_strings[int(usual)]]
    first = usual[0] if isinstance(usual, list) else usual
    if action.choices is not None:
        one = [choice for choice in action.choices if choice != first][-1]
    elif action.type is int:
        one = 2 if first != 2 else 4
    elif action.type is float:
        one = first / 2 or 0.5
    else:
        one = {"device": "cpu:1", "inducing_by_stage": "8,8,8,8"}.get(action.dest, "other")
    return [flag, str(one)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny data under every name."""
    pictures, table, points = images.synthetic(60, 20, side=8), synthetic(), toy.load("cosine")
    monkeypatch.setattr(images, "load", lambda name, *_: replace(pictures, name=name))
    monkeypatch.setattr(uci, "load", lambda name, *_: replace(table, name=name))
    monkeypatch.setattr(toy, "load", lambda name, *_: replace(points, name=name))
    monkeypatch.setattr(corruptions, "corrupt", lambda pictures, *_, **__: pictures)
    monkeypatch.setattr(rotated_mnist, "rotate", lambda pictures, _: pictures)
    kept = sources._images, sources._outside, sources._scored
    for cache in kept:
        cache.cache_clear()
    yield
    for cache in kept:
        cache.cache_clear()


@pytest.mark.parametrize("module", RESUMED)
def test_every_option_is_a_setting_or_free(
    module: str, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was interrupted before its first training continues with another value of a free option, and of no other."""
    main = importlib.import_module(f"bayesify_papers.{module}").main
    read, begin = Program.read, records.begin_run
    programs: list[Program] = []

    def seen(program: Program, arguments: Any) -> argparse.Namespace:
        programs.append(program)
        return read(program, arguments)

    def begun(*arguments: Any, **results: Any) -> None:
        begin(*arguments, **results)
        raise Begun

    def trained(*_: Any, **__: Any) -> None:
        pytest.fail(f"{module} trains before it writes its settings")

    monkeypatch.setattr(Program, "read", seen)
    monkeypatch.setattr(records, "begin_run", begun)
    monkeypatch.setattr(torch.autograd, "backward", trained)
    arguments = [*ARGUMENTS.get(module, []), "--out", str(tmp_path / "out")]

    def refused(*others: str) -> bool:
        with pytest.raises((Begun, ValueError, SystemExit)) as raised:
            main([*arguments, *others])
        assert raised.type is not ValueError or "was written with other settings" in str(raised.value)
        assert raised.type is not SystemExit or others[0] == "--inducing-by-stage"
        return raised.type is not Begun

    assert not refused()
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json"}  # labels come later
    assert not refused()  # the same command resumes
    options = [one for one in programs[0]._actions if one.nargs != 0 or isinstance(one, argparse.BooleanOptionalAction)]
    found = {one.dest: refused(*changed(one)) for one in options if one.dest not in OTHER_USES}
    assert {name for name, other in found.items() if not other} == found.keys() & (FREE | OWN_FREE.get(module, set()))


def test_a_record_keeps_results_and_names_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    recipe = {"batch": 2, "augment": False, "shares": (0.5, 1.0)}
    first = records.begin_run(path, {"seed": 0, "recipe": {**recipe, "device": "cpu"}}, {"date": "first"}, scores={})
    assert records.read(path)["scores"] == {}
    records.write(path, {**first, "scores": {"map": 1}})
    moved = {**recipe, "device": "cuda", "cutout": None}  # records of earlier versions have no cutout
    again = records.begin_run(path, {"seed": 0, "recipe": moved}, {"date": "again"}, scores={})
    assert (again["scores"], again["date"], records.read(path)["date"]) == ({"map": 1}, "again", "first")
    wanted = r"other settings \(batch, cutout, augment\); choose another folder, or empty this one"
    with pytest.raises(ValueError, match=wanted):
        records.begin_run(path, {"seed": 0, "recipe": {"batch": 3, "cutout": 4, "shares": [0.5, 1.0]}})
