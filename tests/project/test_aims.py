"""The table of aims names figures that benchmarks record, and tells which are met."""

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify
from benchmarks import aims, networks_gpu, threads, timing
from tools import speed_table

ROOT = Path(__file__).parents[2]


def test_every_aim_names_a_figure_of_its_file() -> None:
    rows = networks_gpu.ROWS
    for aim in aims.aims():
        path = aims.RESULTS / f"{aim['file']}.json"
        if aim["figure"].rpartition("/")[0] in rows:
            continue  # a row that the benchmark has, measured or not
        if path.exists():
            assert aims.stored(aim, "aarch64") is not None, aim["what"]
        else:
            assert any(f'"{aim["file"]}"' in file.read_text() for file in (ROOT / "benchmarks").glob("*.py")), aim[
                "file"
            ]


def test_other_processors_have_a_folder_of_their_own() -> None:
    assert aims.folder_of(aims.RESULTS, "foundation_cpu", "x86_64") == aims.RESULTS / "x86_64"
    assert aims.folder_of(aims.RESULTS, "foundation_cpu", "aarch64") == aims.RESULTS
    assert aims.folder_of(aims.RESULTS, "resnets_gpu", "x86_64") == aims.RESULTS


def test_verdicts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert aims.is_met({"aim": 2.0}, 1.99)
    assert not aims.is_met({"aim": 2.0}, 2.02)
    assert aims.is_met({"aim": 3.0, "more": True}, 18)
    rows = [{"what": "a", "file": "foundation_cpu", "figure": "mlp_16_fresh_draws", "aim": 100.0, "floor": 1.0}]
    rows.append(rows[0] | {"what": "b", "aim": 0.0})
    rows.append(rows[0] | {"what": "c", "file": "unknown_cpu"})
    monkeypatch.setattr(aims, "aims", lambda: rows)
    monkeypatch.setattr(aims, "MACHINE", "aarch64")
    run = aims.run_of(rows[0], "aarch64")
    for cpu, verdicts in (
        (run["hardware"]["cpu"], ["met", "missed", "not", "1"]),
        ("other", ["(met)", "(missed)", "not", "0"]),
    ):
        monkeypatch.setattr(aims, "hardware", lambda cpu=cpu: {"cpu": cpu, "threads": 1, "gpu": None})
        aims.main()
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in said[:4]] == verdicts
        assert all(fact in said[0] for fact in (run["hardware"]["cpu"], run["date"], run["command"]))
    assert "benchmarks.foundation" in said[-1]


def test_parts_of_figures_and_the_runs_they_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    later = {"date": "b", "rows": ["x/y"]}
    content = {"date": "a", "figures": {"x/y": {"z": {"ms": 2}}, "k: a, b": [1, 3], "w": 4}, "later_runs": [later]}
    monkeypatch.setattr(aims, "_content", lambda aim, machine: content)
    found = {key: aims.stored({"figure": key}, "") for key in ("x/y:z:ms", "k: a, b:1", "w", "v", "x/y:u", "v:ms")}
    assert found == {"x/y:z:ms": 2, "k: a, b:1": 3, "w": 4, "v": None, "x/y:u": None, "v:ms": None}
    assert aims.run_of({"figure": "x/y:z:ms"}, "")["date"] == "b"
    assert aims.run_of({"figure": "w"}, "")["date"] == "a"


def test_every_missed_aim_has_a_reason_and_a_profile() -> None:
    for aim in aims.aims():
        for machine in [""] if aims.on_gpu(aim) else list(aims.MACHINES.values()):
            figure = aims.stored(aim, machine)
            if figure is None or aims.is_met(aim, figure):
                continue
            assert aim.get("reason", "").count(" ") > 3, aim["what"]
            assert speed_table.profile_cells(aim, machine)[-1], f"{aim['what']}, {machine}: no profile"


def test_a_run_of_some_rows_keeps_the_others() -> None:
    before = {"date": "a", "command": "b", "figures": {"x": 1, "y": 2}}
    found = timing.merged(before, {"date": "c", "command": "d", "hardware": {"gpu": "e"}, "figures": {"y": 3}})
    assert found["figures"] == {"x": 1, "y": 3}
    assert found["later_runs"] == [{"date": "c", "command": "d", "hardware": {"gpu": "e"}, "rows": ["y"]}]


def test_stored_commands_are_understood(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command with options that a result names is one that its benchmark still takes."""
    stored = {content["command"] for path in aims.RESULTS.rglob("*.json") for content in runs_of(path)}
    understood = 0
    for words in map(shlex.split, sorted(stored)):
        if words[:2] != ["python", "-m"] or len(words) == 3 or {"...", "and"} & set(words):
            continue  # without options, or told in words
        monkeypatch.setattr("sys.argv", [*words[2:], "--help"])
        with pytest.raises(SystemExit) as left:
            import_module(words[2]).main()
        assert left.value.code == 0, capsys.readouterr().err
        understood += 1
    assert understood > 20


def runs_of(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    return [content, *content.get("later_runs", [])] if "command" in content else []


def test_the_shared_network_of_the_threads_benchmark_gives_the_same_numbers() -> None:
    bnn = bayesify.bayesianize(nn.Linear(3, 2), "mean_field", likelihood="categorical").eval()
    x, draws = torch.randn(4, 3), bnn.draw(3).detach()
    with torch.no_grad():
        assert torch.equal(threads.shared(lambda: draws(x))(), draws(x))
        assert torch.equal(threads.shared(lambda: draws[0](x))(), draws[0](x))
