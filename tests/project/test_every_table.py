"""papers/tables.json is what was published and stored, follows its schema, and makes the page; its commands are real ones."""

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
from bayesify_papers import status
from bayesify_papers.catalog import CATALOG, PAPERS, select
from bayesify_papers.command import plan
from typer.testing import CliRunner

from bayesify.cli import app
from tools import every_table as tables

ROOT = Path(__file__).parents[2]
CONTENT = status.load()
CELL = """paper experiment table row column published published_spread spread_is corrected correction ours ours_spread ours_mixture
seeds better met command date hardware seconds reason"""
FIGURE = "paper experiment figure claim shown command reason"


def test_file_and_page_are_up_to_date():
    made = tables.content()
    assert tables.text(made) == tables.FILE.read_text(), "run python -m tools.every_table"
    assert tables.page(CONTENT) == tables.PAGE.read_text(), "run python -m tools.every_table"


def test_entries_have_all_fields():
    assert list(CONTENT) == ["cells", "figures"]
    for cell in CONTENT["cells"]:
        assert list(cell) == CELL.split()
        assert cell["experiment"] in status.EXPERIMENTS[cell["paper"]]
        assert cell["better"] in ("higher", "lower")
        assert (cell["published_spread"] is None) == (cell["spread_is"] is None)
        assert cell["spread_is"] in ("deviation", "error", None)
        assert (cell["corrected"] is None) == (cell["correction"] is None)
        assert all((cell[key] is None) == (cell["ours"] is None) for key in ("seeds", "date", "hardware"))
        assert cell["met"] is True or cell["reason"], cell
    for figure in CONTENT["figures"]:
        assert list(figure) == FIGURE.split()
        assert figure["experiment"] in status.EXPERIMENTS[figure["paper"]]
        assert figure["shown"] in (True, False, None)
        assert figure["reason"]
    places = [(cell["paper"], cell["table"], cell["row"], cell["column"]) for cell in CONTENT["cells"]]
    assert len(set(places)) == len(places)


def test_every_experiment_has_entries():
    assert list(status.EXPERIMENTS) == list(PAPERS)
    assert sum(map(len, status.EXPERIMENTS.values())) == 31
    entries = {(one["paper"], one["experiment"]) for own in CONTENT.values() for one in own}
    assert entries == {(paper, name) for paper, own in status.EXPERIMENTS.items() for name in own}


def test_met_is_the_rule():
    """By hand, from the fields alone: no worse than the aim by more than its spread, or 1 % of it; some are not compared."""
    for cell in CONTENT["cells"]:
        if cell["ours"] is None or (cell["reason"] and cell["reason"].startswith("Not compared")):
            assert cell["met"] is None
            continue
        aim = cell["corrected"] if cell["corrected"] is not None else cell["published"]
        spread = cell["published_spread"] if cell["published_spread"] is not None else 0.01 * abs(aim)
        sign = 1 if cell["better"] == "lower" else -1
        assert cell["met"] == (sign * (cell["ours"] - aim) <= spread + 1e-9), cell


def test_numbers_that_are_not_compared():
    """Corrupted CIFAR-10 above level 0; what they would be by the rule is said wherever the share is."""
    apart = [one for one in CONTENT["cells"] if one["ours"] is not None and one["met"] is None]
    levels = [one for one in apart if one["experiment"] == "corrupted CIFAR-10"]
    assert {one["table"][-1] for one in levels} == set("12345")
    would = sum(status.met(one) for one in levels)
    own = status.counts(CONTENT, "subnetwork")
    assert own["ran"] - own["compared"] == len(levels)
    remarks = "\n".join(status.remarks(CONTENT))
    assert f"not compared: {len(levels)}; by the rule {would} would be met" in remarks
    assert status.summary(CONTENT).endswith(remarks)
    words = f"by the rule {would} of {len(levels)} would be met"
    for path in ("papers/README.md", "docs/experiments/subnetwork.md", "docs/experiments/every-table.md"):
        assert words in (ROOT / path).read_text()
    counts = {one["table"] for one in CONTENT["cells"] if one["paper"] == "inducing-weights" and one["met"] is not None}
    assert all("parameters of" in name for name in counts)  # as papers/README.md says
    assert all(name in remarks for name in counts)


def test_the_rule_at_its_edges():
    cell = {"published": 2.0, "published_spread": 0.5, "corrected": None, "ours": 2.5, "better": "lower"}
    assert status.met(cell)
    assert not status.met({**cell, "ours": 2.51})
    assert status.met({**cell, "ours": 1.5, "better": "higher"})
    assert not status.met({**cell, "ours": 1.49, "better": "higher"})
    assert status.met({**cell, "corrected": 2.1, "ours": 2.6})
    assert not status.met({**cell, "published_spread": None, "ours": 2.03})
    assert status.met({**cell, "published": -2.0, "published_spread": None, "ours": -1.98})
    assert not status.met({**cell, "published_spread": 0.0, "ours": 2.01})
    assert status.met({**cell, "ours": None}) is None


@pytest.mark.parametrize(("share", "expected"), [(0.0099, True), (0.0101, False)])
def test_numbers_are_compared_with_all_their_digits(monkeypatch, share, expected):
    """Ours is worse by just less or just more than 1 %, which the two printed digits of a log-likelihood do not tell."""
    table = {
        "paper": "global-inducing",
        "experiment": "CIFAR-10",
        "title": "Table",
        "path": "cifar10",
        "command": "",
        "reasons": [{"text": "why"}],
    }
    table |= {"axes": ["posterior", "prior", "metric"], "names": ["log_likelihood", "accuracy", "elbo"]}
    theirs = tables.theirs_of(table)
    facts = {"error": None, "runs": 1, "date": "", "hardware": "", "seconds": None}
    ours = {key: {"ours": value - share * abs(value), **facts} for key, (value, _) in theirs.items()}
    monkeypatch.setattr(tables, "ours_of", lambda _: ours)
    found = tables.cells(table)
    assert len(found) == len(theirs) > 20
    assert {cell["met"] for cell in found} == {expected}
    assert [cell["ours"] for cell in found] == [one["ours"] for one in ours.values()]
    assert any(cell["reason"] == tables.BY_ROUNDING for cell in found) != expected


def find(table: str, row: str, column: str) -> dict:
    return next(one for one in CONTENT["cells"] if (one["table"], one["row"], one["column"]) == (table, row, column))


def test_numbers_are_the_papers_and_ours():
    cell = find("Table 2: one hidden layer, test MNLL", "boston", "WHVI")
    assert (cell["published"], cell["published_spread"], cell["corrected"]) == (2.55, 0.15, 2.6432)
    assert (cell["ours"], cell["seeds"], cell["met"]) == (pytest.approx(2.88, abs=5e-3), 20, False)  # over single draws
    assert cell["ours_mixture"] == pytest.approx(2.64, abs=5e-3)
    assert (
        cell["command"]
        == "bayesify reproduce walsh-hadamard/table2 --part boston --arguments '--models WHVI --faithful'"
    )
    naval = find("Table 2: one hidden layer, test MNLL", "naval", "MFG")
    assert (naval["corrected"], naval["ours"], naval["met"]) == (-6.2936, pytest.approx(-9.69, abs=5e-3), True)
    assert find("Table 2: one hidden layer, test MNLL", "power", "NNG")["corrected"] is None  # from another paper
    assert find("Table 2: one hidden layer, test MNLL", "energy", "WHVI")["corrected"] == 3.1964  # two targets
    assert find("Table 9: parameters of a ResNet-50", "FFG-U, M=64", "parameters")["ours"] == 5_710_902
    turned = find("Table 6: MNIST turned by 60 degrees", "LL", "Ours")
    assert (turned["published"], turned["published_spread"], turned["better"]) == (-2.10, 0.03, "higher")


COMMANDS = {one["command"] for own in CONTENT.values() for one in own if one["command"]}


@pytest.mark.parametrize("command", sorted({part for command in COMMANDS for part in command.split(" && ")}))
def test_commands_are_real(command, capsys, monkeypatch):
    """The words are options of `bayesify reproduce`, the experiment and its part exist, and its program takes the arguments."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:  # from the root of the repository
        assert words[2].startswith("benchmarks.")
        monkeypatch.setattr(sys, "argv", [*words[2:], "--help"])
        with pytest.raises(SystemExit) as left:
            importlib.import_module(words[2]).main()
        assert left.value.code == 0, capsys.readouterr().err
        return
    assert words[:2] == ["bayesify", "reproduce"]
    name, rest = words[2], words[3:]
    options = list(zip(rest[::2], rest[1::2], strict=True))
    assert {option for option, _ in options} <= {"--part", "--arguments", "--out"}
    assert name in CATALOG
    only = [value for option, value in options if option == "--part"]
    jobs = plan(select([name]), only=only, extra=shlex.split(dict(options).get("--arguments", "")))
    assert len(jobs) == len(only) or not only
    for job in jobs.values():
        with pytest.raises(SystemExit) as left:
            importlib.import_module(CATALOG[name].target).main([*job["arguments"], "--out", "somewhere", "--help"])
        assert left.value.code == 0, capsys.readouterr().err


def test_stored_results_are_of_programs_that_are_here(monkeypatch, capsys):
    """Every command that a result names is of a module of the papers, which still takes its arguments."""

    class Understood(Exception):
        pass

    def read(self, arguments=None):
        self.parse_args(list(arguments))
        raise Understood

    monkeypatch.setattr("bayesify_papers.shared.program.Program.read", read)
    stored = {json.loads(path.read_text())["command"] for path in (ROOT / "papers" / "results").rglob("*.json")}
    for command in sorted(stored):
        words = shlex.split(command)
        if words[:2] == ["bayesify", "reproduce"]:
            assert words[2] in CATALOG
            continue
        assert words[:2] == ["python", "-m"]
        assert words[2].startswith("bayesify_papers.")
        with pytest.raises(Understood):
            importlib.import_module(words[2]).main(words[3:])
    assert len(stored) > 200


def spent(value, inside=False):
    """The numbers below keys that name seconds."""
    if isinstance(value, dict):
        return [one for key, part in value.items() for one in spent(part, inside or "seconds" in key)]
    if isinstance(value, list):
        return [one for part in value for one in spent(part, inside)]
    return [value] if inside and isinstance(value, int | float) else []


def test_what_a_gpu_made_has_its_seconds():
    stored = {path: json.loads(path.read_text()) for path in sorted((ROOT / "papers" / "results").rglob("*.json"))}
    made = {path: content for path, content in stored.items() if content["hardware"]["gpu"]}
    assert len(made) > 150
    assert [path.name for path, content in made.items() if max(spent(content), default=0) <= 0] == []
    missing = [cell for cell in CONTENT["cells"] if "NVIDIA" in (cell["hardware"] or "") and not cell["seconds"]]
    assert missing == []


def test_status_is_printed():
    run = CliRunner().invoke(app, ["reproduce", "--status"])
    assert run.exit_code == 0
    line = next(line for line in run.output.splitlines() if line.startswith("Rossi"))
    own = status.counts(CONTENT, "walsh-hadamard")
    assert f"{own['met']} of {own['compared']}" in line
    run = CliRunner().invoke(app, ["reproduce", "--status", "walsh-hadamard/table 2", "function-space"])
    assert run.exit_code == 0
    assert "log2(pi)" not in run.output
    assert "not_run" not in run.output
    assert "Figure 8: more context inputs do not change the test accuracy: shown" in run.output
    assert any(line.split()[:2] == ["boston", "WHVI"] and line.endswith("no") for line in run.output.splitlines())
    run = CliRunner().invoke(app, ["reproduce", "--status", "nothing"])
    assert run.exit_code == 2
