"""Every experiment of the papers has a name, runs quickly, resumes, and puts its numbers beside the published ones."""

import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bayesify_papers import status as status_file
from bayesify_papers.catalog import CATALOG, PAPERS, select
from bayesify_papers.command import listing, plan, reproduce, summarize
from bayesify_papers.shared import rows
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.scale_out import JobsFailed

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent


def test_every_quick_run_is_tested_once() -> None:
    texts = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py") if path.name != Path(__file__).name)
    for name, experiment in CATALOG.items():
        times = texts.count(f'smoke("{name}")')
        assert times == bool(experiment.smoke), f"{name} is tested {times} times"


# -- the catalog ------------------------------------------------------------------------------------------------------------


def test_every_paper_is_in_the_catalog() -> None:
    assert {name.partition("/")[0] for name in CATALOG} == set(PAPERS)
    assert {"walsh-hadamard/table2", "global-inducing/uci", "inducing-weights/regression"} <= set(CATALOG)
    assert all(name in listing() for name in CATALOG)
    assert "function-space/cifar10" not in listing(smoke=True)


def test_status_takes_the_names_that_the_list_prints() -> None:
    content = status_file.load()
    listed = status_file.details(content, ["walsh-hadamard/table2"])
    assert listed == status_file.details(content, ["walsh-hadamard/table 2"]) != ""
    assert all(status_file.details(content, [name]) for name in CATALOG)
    with pytest.raises(ValueError, match="no entries of 'walsh-hadamard/table3'"):
        status_file.details(content, ["walsh-hadamard/table3"])


@pytest.mark.parametrize("name", CATALOG)
def test_programs_take_their_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` comes last, so that a program that knew no such option or choice would end with status 2 before it."""
    experiment = CATALOG[name]
    main = importlib.import_module(experiment.target).main
    for arguments in [*experiment.runs(False).values(), *experiment.runs(True).values()]:
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--out", "somewhere", "--help"])
        assert left.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, experiment in CATALOG.items() if experiment.results])
def test_results_are_where_the_catalog_says(name: str) -> None:
    assert list(ROOT.glob(CATALOG[name].results)), CATALOG[name].results


def test_experiments_are_found_by_name_paper_and_pattern() -> None:
    assert [one.name for one in select(["subnetwork/uci"])] == ["subnetwork/uci"]
    assert [one.name for one in select(["*/uci"])] == ["subnetwork/uci", "global-inducing/uci"]
    assert {one.name.partition("/")[0] for one in select(["function-space"])} == {"function-space"}
    with pytest.raises(ValueError, match="did you mean walsh-hadamard/table2"):
        select(["walsh-hadamard/tabel2"])


def test_parts_are_runs_of_their_own() -> None:
    jobs = plan(select(["walsh-hadamard/table2"]), only=["yacht"], extra=["--splits", "2"])
    assert jobs == {
        "walsh-hadamard/table2/yacht": {
            "experiment": "walsh-hadamard/table2",
            "part": "yacht",
            "arguments": ["--datasets", "yacht", "--splits", "2"],
        }
    }
    with pytest.raises(ValueError, match="no part ocean; choose from boston, concrete"):
        plan(select(["walsh-hadamard/table2"]), only=["ocean"])


# -- rows -------------------------------------------------------------------------------------------------------------------


def test_a_row_beside_a_published_number() -> None:
    made = rows.row({"a": 1}, "rmse", [1.0, 2.0, 3.0], (1.5, 0.25))
    assert made["ours"] == 2.0
    assert made["error"] == pytest.approx(1 / 3**0.5)
    assert (made["difference"], made["deviations"]) == (0.5, 2.0)
    assert rows.row({}, "rmse", 2.0, (1.5, 0.0))["deviations"] is None
    assert rows.row({}, "rmse", 2.0, 1.5)["difference"] == 0.5
    assert rows.row({}, "rmse", 2.0)["difference"] is None


def find(found: list[rows.Row], metric: str, **setting: Any) -> rows.Row:
    (one,) = (row for row in found if row["metric"] == metric and setting.items() <= row["setting"].items())
    return one


def test_our_table_2_beside_the_papers() -> None:
    found = CATALOG["walsh-hadamard/table2"].read(ROOT / "papers/results/walsh_hadamard/table2/splits")
    yacht = find(found, "rmse", dataset="yacht", model="WHVI")
    lines = (ROOT / "papers/results/walsh_hadamard/table2/splits/yacht-whvi-1x50.jsonl").read_text().splitlines()
    mean = sum(json.loads(line)["rmse"] for line in lines) / 20
    assert yacht["runs"] == 20
    assert yacht["ours"] == pytest.approx(mean)
    assert (yacht["published"], yacht["published_std"]) == (0.96, 0.20)
    assert yacht["deviations"] == pytest.approx((mean - 0.96) / 0.20)
    assert find(found, "mnll", dataset="concrete", model="WHVI")["published"] == pytest.approx(2.95 + 0.0932)
    assert find(found, "rmse", dataset="energy", model="MFG")["published"] == 1.52  # both targets, as in the paper
    shown = summarize([{"experiment": "walsh-hadamard/table2", **yacht}]).splitlines()
    assert shown[0] == "walsh-hadamard/table2"
    assert shown[2].split() == [
        "dataset",
        "model",
        "hidden",
        "layers",
        "width",
        "runs",
        "rmse",
        "paper",
        "diff/sd",
        "seconds",
    ]
    assert shown[4].split()[:5] == ["yacht", "WHVI", "1", "50", "20"]
    assert shown[4].split()[7:] == ["0.96", "(0.2)", "-1.4", "-"]


def test_kinds_of_settings_are_tables_of_their_own() -> None:
    made = [rows.row({"a": 1}, "x", 2.0), rows.row({"b": 1}, "y", 3.0, 4.0), rows.row({"a": 1}, "z", [1.0, 2.0])]
    first, second = rows.show(made).split("\n\n")
    assert [line.split() for line in first.splitlines()[::2]] == [
        ["a", "runs", "x", "z", "seconds"],
        ["1", "1", "2", "1.5", "(0.5)", "-"],
    ]
    assert [line.split() for line in second.splitlines()[::2]] == [
        ["b", "runs", "y", "paper", "seconds"],
        ["1", "1", "3", "4", "-"],
    ]


def copied(folder: Path, file: str) -> Path:
    shutil.copy(ROOT / "papers" / "results" / file, folder / "results.json")
    return folder


def test_our_rotated_mnist_beside_the_papers(tmp_path: Path) -> None:
    found = CATALOG["subnetwork/rotated-mnist"].read(copied(tmp_path, "subnetwork/rotated_mnist_hessian.json"))
    stored = json.loads((tmp_path / "results.json").read_text())["scores"]["map"]["shifted"]["60"]
    turned = find(found, "ll", system="map", shift="60")
    assert turned["ours"] == -stored["nll"]
    assert (turned["published"], turned["published_std"]) == (-4.29, 0.21)
    assert find(found, "error", system="map", shift="60")["ours"] == pytest.approx(1 - stored["accuracy"])
    assert find(found, "auroc", system="swag", outside="fashion_mnist")["published"] == 0.97
    assert find(found, "auroc", system="swag", outside="notmnist")["published"] is None
    assert find(found, "ll", system="subnetwork_tuned", shift="0")["published"] is None


def test_our_fashion_beside_the_papers(tmp_path: Path) -> None:
    found = CATALOG["function-space/fashion"].read(copied(tmp_path, "function_space/fashion_mnist.json"))
    accuracy = find(found, "accuracy", system="fsvi")
    assert accuracy["published"] == 91
    assert accuracy["runs"] == 3
    assert accuracy["difference"] == pytest.approx(accuracy["ours"] - 91)
    assert 80 < accuracy["ours"] < 100
    assert find(found, "ece", system="fsvi")["published"] == 0.02
    assert find(found, "accuracy", system="fsvi.10")["published"] is None


# -- the command ------------------------------------------------------------------------------------------------------------


def fake(status: int | Exception) -> Any:
    def main(arguments: list[str]) -> int:
        if isinstance(status, Exception):
            raise status
        print("printed", arguments)
        out = Path(arguments[-1])
        (out / "approximability.json").write_text(json.dumps({"rows": [{"size": 2, "median": 0.5}]}))
        return status

    return main


def test_command_runs_once_logs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(CATALOG["walsh-hadamard/approximability"].target)
    monkeypatch.setattr(module, "main", fake(0))
    arguments = ["reproduce", "walsh-hadamard/approximability", "--smoke", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "results.jsonl" in done.output
    assert "'--smoke', '--out'" in (tmp_path / "walsh-hadamard/approximability/log.txt").read_text()
    about = json.loads((tmp_path / "reproduce.json").read_text())
    assert {"date", "command", "hardware", "versions", "smoke", "engine"} <= set(about)
    monkeypatch.setattr(module, "main", fake(ValueError("run again")))
    assert CliRunner().invoke(app, arguments).exit_code == 0
    mixed = CliRunner().invoke(app, ["reproduce", "walsh-hadamard/approximability", "--out", str(tmp_path)])
    assert mixed.exit_code == 2
    assert "holds smoke results; give another --out" in mixed.output


def test_failures_are_named_and_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce([CATALOG["walsh-hadamard/table2"]], tmp_path, smoke=True)
    before = (tmp_path / "results.jsonl").read_text()
    module = importlib.import_module(CATALOG["walsh-hadamard/approximability"].target)

    def end(status: Any) -> int:
        if isinstance(status, BaseException):
            raise status
        return int(status)

    for status in (3, ValueError("no such matrix"), SystemExit(2)):
        monkeypatch.setattr(module, "main", lambda arguments, status=status: end(status))
        with pytest.raises(JobsFailed, match="walsh-hadamard/approximability failed"):
            reproduce([CATALOG["walsh-hadamard/approximability"]], tmp_path, smoke=True)
        assert (tmp_path / "results.jsonl").read_text() == before
        arguments = ["reproduce", "walsh-hadamard/approximability", "--smoke", "--out", str(tmp_path)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert "log.txt" in done.output


def test_command_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "--list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in CATALOG)
    assert CliRunner().invoke(app, ["reproduce"]).exit_code == 2
    wrong = CliRunner().invoke(app, ["reproduce", "subnetwork/uic"])
    assert wrong.exit_code == 2
    assert "did you mean subnetwork/uci" in wrong.output
    engine = CliRunner().invoke(app, ["reproduce", "subnetwork/uci", "--engine", "slurm", "--smoke"])
    assert engine.exit_code == 2
    assert "choose from local, dask, ray" in engine.output
    assert not list(tmp_path.iterdir())


# -- engines ----------------------------------------------------------------------------------------------------------------


def lasting(found: list[rows.Row]) -> list[rows.Row]:
    return [{**row, "seconds": None} for row in found if not row.get("timing")]


@pytest.mark.slow  # minutes: every quick run on every engine
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
def test_the_same_results_on_every_engine(tmp_path: Path) -> None:
    experiments = list(CATALOG.values())
    expected = lasting(reproduce(experiments, tmp_path / "one", smoke=True, workers=1))
    for engine, package in (("local", "joblib"), ("dask", "distributed"), ("ray", "ray")):
        if importlib.util.find_spec(package) is not None:
            found = reproduce(experiments, tmp_path / engine, smoke=True, engine=engine, workers=2)
            assert lasting(found) == expected, engine
