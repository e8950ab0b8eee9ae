"""papers/tables.json is what was published and stored, follows its schema, and makes the page; its commands are real ones."""

import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from bayesify_papers import status
from bayesify_papers.catalog import CATALOG, PAPERS, select
from bayesify_papers.command import plan
from typer.testing import CliRunner

from bayesify.cli import app
from tools import every_table as tables
from tools.paper_claims import verdict
from tools.paper_claims.rankings import Comparison, Ranking, in_brief, left_out, told

ROOT = Path(__file__).parents[2]
CONTENT = status.load()
CELL = """paper experiment table row column published published_spread spread_is digits exact corrected correction misprint ours
ours_spread ours_other other_is seeds better corrupted repeated met agrees command date hardware seconds reason note training"""
FIGURE = "paper experiment figure claim title setting variant ran shown printed command reason brief cause"


def test_file_and_page_are_up_to_date():
    made = tables.content()
    assert tables.text(made) == tables.FILE.read_text(), "run python -m tools.every_table"
    assert tables.page(CONTENT) == tables.PAGE.read_text(), "run python -m tools.every_table"
    claims = tables.claims_page(CONTENT, tables.above_claims())
    assert claims == tables.CLAIMS_PAGE.read_text(), "run python -m tools.every_table"


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
        assert bool(figure["cause"]) == (figure["shown"] is False), figure
    named = [(one["paper"], one["figure"], one["claim"]) for one in CONTENT["figures"]]
    assert len(set(named)) == len(named)
    places = [(cell["paper"], cell["table"], cell["row"], cell["column"]) for cell in CONTENT["cells"]]
    assert len(set(places)) == len(places)


def test_every_experiment_has_entries():
    assert list(status.EXPERIMENTS) == list(PAPERS)
    assert sum(map(len, status.EXPERIMENTS.values())) == 31
    entries = {(one["paper"], one["experiment"]) for own in CONTENT.values() for one in own}
    assert entries == {(paper, name) for paper, own in status.EXPERIMENTS.items() for name in own}


def by_hand(cell):
    """Met and agrees, from the text that the page prints, apart from the code that makes the file."""
    if cell["ours"] is None or cell["misprint"]:
        return None, None
    text = tables._text(cell).replace(",", "").replace(tables.NO_BREAK_SPACE, "")
    ours = Decimal(re.match(r"[*]*([-.0-9]+)", text)[1])
    aim, spread, corrected = (
        part and Decimal(part) for part in re.search(r"[(]([-.0-9]+)(?:±([.0-9]+))?(?:→([-.0-9]+))?[)]$", text).groups()
    )
    allowed = abs(aim) / 100 if spread is None else spread
    aim = aim if corrected is None else corrected
    if cell["exact"]:
        return ours == aim, ours == aim
    better = ours > aim if cell["better"] == "higher" else ours < aim
    return better or abs(ours - aim) <= allowed, abs(ours - aim) <= allowed


def test_met_and_agrees_are_the_rule():
    for cell in CONTENT["cells"]:
        assert (cell["met"], cell["agrees"]) == by_hand(cell), cell


def test_numbers_are_printed_as_they_are_judged():
    """Binary 0.075 is below 0.075 and would be printed as 0.07, although it is judged as 0.08."""
    cell = find("Table 4: MNIST rotated by 30 degrees", "error", "SWAG")
    assert cell["ours"] < 0.075
    assert cell["agrees"]
    assert tables._text(cell).startswith("**0.08**≈ (0.08")


def test_a_label_belongs_to_its_axis():
    """The share kept and the severity have a value 1 each, and only the share's has a label."""
    own = [one for one in CONTENT["cells"] if one["table"].startswith(("Table 15: corrupted", "Table 16: corrupted"))]
    assert {one["column"] for one in own} == {f"severity {number}" for number in range(1, 6)}
    assert {one["row"].partition(", ")[2] for one in own} >= {"100 % kept", "10 % kept"}


def test_totals_agree_with_a_recount():
    """An independent loop over the file gives every number of the summary."""
    lines = status.summary(CONTENT).splitlines()[2:]
    for paper, line in zip([*PAPERS, None], lines, strict=False):
        tally = Counter()
        for cell in CONTENT["cells"]:
            if paper in (None, cell["paper"]) and cell["ours"] is not None:
                one, two = by_hand(cell)
                tally.update(run=1, met=one, agree=two, single=cell["seeds"] == 1)
                if not cell["corrupted"]:
                    tally.update(clean=1, clean_met=one, clean_agree=two)
        own = [one for one in CONTENT["figures"] if paper in (None, one["paper"])]
        shares = [("met", "run"), ("agree", "run"), ("clean_met", "clean"), ("clean_agree", "clean")]
        for part, whole in shares:
            words = f"{tally[part]:,} of {tally[whole]:,} ({tally[part] / tally[whole]:.0%})"
            assert words in line, (paper, part)
            line = line[line.index(words) + len(words) :]
        words = [f"{tally['single']:,}"]
        for variant in (False, True):
            verdicts = Counter(str(one["shown"]) for one in own if one["variant"] == variant)
            words.append(f"{verdicts['True']} / {verdicts['False']} / {verdicts['None']}")
        assert re.split(r"  +", line.strip()) == words


def test_counts_are_exact_and_percentages_are_judged_by_their_digits():
    sizes = [one for one in CONTENT["cells"] if one["exact"]]
    assert {one["column"] for one in sizes} == {"parameters", "relative size in percent"}
    wrong = [one["row"] for one in sizes if not one["met"]]
    assert wrong == ["FFG-W, 50 %", "FFG-W, 10 %", "FFG-W, 1 %", "FFG-W, 0.1 %"]
    assert all(one["met"] == (one["ours"] == one["published"]) for one in sizes if one["column"] == "parameters")
    kept = {"FFG-W, 50 %": 0.5, "FFG-W, 10 %": 0.1, "FFG-W, 1 %": 0.01, "FFG-W, 0.1 %": 0.001}
    for one in sizes:
        if one["row"] in kept and one["column"] == "parameters":  # what the reason says that the authors count
            assert one["published"] == 53_120 + 20 + int(kept[one["row"]] * 46_935_424)
    assert find(
        "Table 10: parameters of a pruned ResNet-50, by the share kept", "FFG-W, 0.1 %", "relative size in percent"
    )["met"]


def test_corrupted_images_count_and_are_set_apart():
    """Corrupted CIFAR-10 above level 0 is compared, and the totals without it stand next to those with it."""
    levels = [one for one in CONTENT["cells"] if one["corrupted"] and one["ours"] is not None]
    assert {one["table"][-1] for one in levels if one["paper"] == "subnetwork"} == set("12345")
    assert all(one["met"] is not None for one in levels)
    own = status.counts(CONTENT, "subnetwork")
    assert own["compared"] - own["clean"] == len([one for one in levels if one["paper"] == "subnetwork"]) == 140
    words = (
        f"{own['met'] - own['clean_met']} of 140 are met or better, {own['agrees'] - own['clean_agrees']} of 140 agree"
    )
    for path in ("papers/README.md", "docs/experiments/subnetwork.md"):
        assert words in " ".join((ROOT / path).read_text().split()), words


def test_counts_of_parameters_are_told_apart_from_scores():
    """Scores of Ritter et al. that are met, counted by the tables' names, stand below the totals."""
    judged = [one for one in CONTENT["cells"] if one["paper"] == "inducing-weights" and one["met"] is not None]
    scores = [one for one in judged if "parameters of" not in one["table"]]
    met, agree = (sum(one[rule] for one in scores) for rule in ("met", "agrees"))
    words = f"Of the {len(scores)} scores, {met} ({met / len(scores):.0%}) are met or better and {agree} "
    assert words in "\n".join(status.remarks(CONTENT))


def test_numbers_that_a_paper_prints_twice_are_marked():
    """Each has the same published number and the same number of ours in another table."""
    marked = [one for one in CONTENT["cells"] if one["repeated"]]
    others = {
        (one["published"], one["published_spread"], one["ours"]) for one in CONTENT["cells"] if not one["repeated"]
    }
    assert len(marked) == 36
    assert all((one["published"], one["published_spread"], one["ours"]) in others for one in marked)
    assert f"{sum(one['ours'] is not None for one in marked)} of the numbers run" in status.summary(CONTENT)


def test_the_rule_at_its_edges():
    cell = {"published": 2.0, "published_spread": 0.5, "corrected": None, "ours": 2.5, "better": "lower"}
    cell |= {"digits": 2, "exact": False}
    assert status.met(cell)
    assert not status.met({**cell, "ours": 2.51})
    assert status.met({**cell, "ours": 2.504})  # 2.50 in the printed digits
    assert status.met({**cell, "ours": 1.5, "better": "higher"})
    assert not status.met({**cell, "ours": 1.49, "better": "higher"})
    assert status.met({**cell, "ours": 0.1})
    assert not status.agrees({**cell, "ours": 0.1})
    assert status.agrees({**cell, "ours": 1.5})
    assert status.met({**cell, "corrected": 2.1, "ours": 2.6})
    assert not status.met({**cell, "published_spread": None, "ours": 2.03})
    assert status.met({**cell, "published": -2.0, "published_spread": None, "ours": -1.98})
    assert not status.met({**cell, "published_spread": 0.0, "ours": 2.01})
    assert status.met({**cell, "published_spread": 0.0, "ours": 2.004})
    assert not status.met({**cell, "exact": True, "digits": 0, "ours": 1.0})
    assert status.met({**cell, "ours": None}) is status.agrees({**cell, "ours": None}) is None


def test_a_misprint_is_marked():
    marked = [one for one in CONTENT["cells"] if one["misprint"]]
    assert [(one["row"], one["column"], one["published"]) for one in marked] == [("NNG, 512 units", "protein", 5.91)]
    assert find(marked[0]["table"], "NNG, 512 units", "yacht")["published"] == 5.91
    assert "5.91\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.80, a misprint" in tables.PAGE.read_text()


def find(table: str, row: str, column: str) -> dict:
    return next(one for one in CONTENT["cells"] if (one["table"], one["row"], one["column"]) == (table, row, column))


def test_numbers_are_the_papers_and_ours():
    cell = find("Table 2: one hidden layer, test MNLL", "boston", "WHVI")
    assert (cell["published"], cell["published_spread"], cell["corrected"]) == (2.55, 0.15, 2.6432)
    assert (cell["ours"], cell["seeds"], cell["met"]) == (pytest.approx(2.88, abs=5e-3), 20, False)  # over single draws
    assert cell["ours_other"] == pytest.approx(2.64, abs=5e-3)
    assert (
        cell["command"]
        == "bayesify reproduce walsh-hadamard/table2 --part boston --arguments '--models WHVI --faithful'"
    )
    naval = find("Table 2: one hidden layer, test MNLL", "naval", "MFG")
    assert (naval["corrected"], naval["ours"], naval["met"]) == (-6.2936, pytest.approx(-9.69, abs=5e-3), True)
    assert find("Table 2: one hidden layer, test MNLL", "power", "NNG")["corrected"] is None  # from another paper
    assert find("Table 2: one hidden layer, test MNLL", "energy", "WHVI")["corrected"] == 3.1964  # two targets
    assert find("Table 9: parameters of a ResNet-50", "FFG-U, M=64", "parameters")["ours"] == 5_710_902
    turned = find("Table 6: MNIST rotated by 60 degrees", "LL", "Subnetwork")
    assert (turned["published"], turned["published_spread"], turned["better"]) == (-2.10, 0.03, "higher")
    noise = find(
        "Table 1: trained on Fashion-MNIST, out-of-distribution MNIST",
        "FSVI (uniform noise as context)",
        "AUROC by entropy",
    )
    assert (noise["published"], noise["seeds"], noise["met"]) == (86, 3, False)
    assert noise["ours"] == pytest.approx(73.3, abs=0.05)  # the paper's context; notMNIST stands next to it
    assert noise["ours_other"] == pytest.approx(95.1, abs=0.06)


def test_systems_on_rotated_digits_are_of_their_own_runs():
    """MAP and the subnetwork share a run, dropout and the ensemble share another; the first run has the others."""
    stored = ROOT / "papers/results/subnetwork"
    first, later, newest = (
        json.loads((stored / f"rotated_mnist{name}.json").read_text()) for name in ("", "_others", "_256")
    )
    images = {sum(curve["count"]) for own in later["scores"].values() for curve in own["reliability"].values()}
    assert f"{images.pop():,} test images" in later["remark"]
    assert not images
    for column, content, system in (
        ("MAP", newest, "map"),
        ("Subnetwork", newest, "subnetwork_tuned"),
        ("SWAG", first, "swag"),
        ("Dropout", later, "dropout"),
        ("Ensemble", later, "ensemble"),
    ):
        cell = find("Table 6: MNIST rotated by 60 degrees", "LL", column)
        assert cell["ours"] == -content["scores"][system]["shifted"]["60"]["nll"]
        cell = find("Table 1: detecting out-of-distribution images, AUROC", "MNIST, Fashion-MNIST", column)
        assert cell["ours"] == content["scores"][system]["ood"]["fashion_mnist"]["auroc_entropy"]


def test_rankings_by_single_draws_count_the_mixture_too():
    claims = [one for one in CONTENT["figures"] if "of single draws" in one["claim"] and one["shown"] is not None]
    assert len(claims) > 15
    assert all("If we score the mixture of draws instead of single draws, " in one["reason"] for one in claims)
    (wide,) = [one for one in claims if one["claim"].startswith("WHVI has a lower RMSE with 512 units")]
    assert (wide["shown"], wide["reason"].startswith("3 of 8")) == (False, True)
    assert "If we score the mixture of draws instead of single draws, 5 of 8 comparisons hold." in wide["reason"]
    assert "The paper's own numbers show the claim: 7 of 8 comparisons hold." in wide["reason"]


def test_systems_on_corrupted_images_share_the_map_estimate():
    """Dropout, SWAG and the ensemble are from a second run, whose MAP scores equal those of the first run."""
    first, second = (
        json.loads((ROOT / f"papers/results/subnetwork/corrupted_cifar{name}.json").read_text())["scores"]
        for name in ("", "_others")
    )
    assert first["map"]["shifted"] == second["map"]["shifted"]
    for column, own in (("MAP", first["map"]), ("SWAG", second["swag"]), ("Ensemble", second["ensemble"])):
        cell = find("Table 15: CIFAR-10 under corruptions of level 0", "LL", column)
        assert cell["ours"] == -own["shifted"]["none-0"]["nll"]


def test_rankings_of_published_numbers_are_corrected():
    """On concrete, the MNLL of WHVI is 2.95 as printed and 3.04 after the correction, which is above the 3.04 of NNG."""
    (claim,) = [
        one for one in CONTENT["figures"] if "lower MNLL than NNG" in one["claim"] and "one hidden" in one["claim"]
    ]
    assert claim["printed"] is False


# -- claims -----------------------------------------------------------------------------------------------------------------

LISTED = tomllib.loads(tables.TABLES.read_text())
GRIDS = {one["id"]: one for one in (*LISTED["tables"], *LISTED["problems"]) if "id" in one}


def judged(monkeypatch, change):
    """All claims under results that were changed."""
    real = tables.ours_of
    monkeypatch.setattr(tables, "ours_of", lambda table: change(real(table)))
    return [entry for figure in LISTED["figures"] if "ranking" in figure for entry in tables.claims(figure, GRIDS)]


def test_every_claim_is_judged_by_files_or_untested():
    for figure in LISTED["figures"]:
        assert len({"check", "ranking"} & set(figure)) == 1 or "not_run" in figure
        assert not {"shown", "verdict"} & set(figure), "a verdict is never typed"
    assert len(CONTENT["figures"]) > 120


def test_rankings_follow_the_numbers(monkeypatch):
    """With every number of ours negated, a strict claim that held in all comparisons fails; without ours all are untested."""
    before = [one for one in CONTENT["figures"] if "comparison" in one["reason"]]
    assert len(before) > 45
    strict = {
        one["claim"] for one in before if one["shown"] and "within" not in one["claim"] and "error" not in one["claim"]
    }
    turned = judged(monkeypatch, lambda rows: {key: {**row, "ours": -row["ours"]} for key, row in rows.items()})
    after = {one["claim"]: one["shown"] for one in turned}
    assert {claim: after[claim] for claim in strict if claim in after} == dict.fromkeys(strict, False)
    monkeypatch.undo()
    assert {one["shown"] for one in judged(monkeypatch, lambda rows: {})} == {None}


def test_page_has_every_verdict():
    """The verdicts on the page, read back from its lines, are those of the file."""
    text, found = tables.CLAIMS_PAGE.read_text().split("\n## ", 1)[1], []
    for item in re.split(r"^- (?=\*\*)", text, flags=re.M)[1:]:
        own = [one for one in CONTENT["figures"] if f"**{one['title'][0].upper()}{one['title'][1:]}** (" in item]
        lines = re.findall(r"\*(Not shown|Untested|Shown)(?: \(our setting\))?(?:\.\*|\* for (.*?): )", item)
        rows = re.findall(r"^    \| (.*?) \| (not shown|untested|shown)(?: \(our setting\))? \|", item, re.M)
        for word, place in [*lines, *((word, place) for place, word in rows)]:
            names = sorted({one["setting"] for one in own if one["setting"]}, key=len, reverse=True) if place else []
            count = sum(bool(place := place.replace(name, "#", 1)) for name in names if name in place)
            assert not place or re.fullmatch(r"#(, #)*( and #)?", place), place
            found += [word.lower()] * max(count, 1)
    assert Counter(found) == Counter(status.VERDICTS[one["shown"]] for one in CONTENT["figures"])


def test_comparisons_that_were_not_run_count_as_failing():
    """With 3 of 5 run comparisons, "most" of 8 is open; with 5 of 5 it is shown; what fails on the run ones stays not shown."""
    most = Ranking("model", ["A"], ["B"], {}, share=0.51)

    def compared(count, holds):
        return [Comparison("RMSE", f"on {holds}{place}", "A", "B", 1.0, 2.0, holds) for place in range(count)]

    unrun = compared(3, True)
    for wins, fails, left, shown in ((3, 2, [], True), (3, 2, unrun, None), (5, 0, unrun, True), (2, 3, unrun, False)):
        assert told(most, compared(wins, True) + compared(fails, False), [], "", left)[0] is shown
    assert left_out([Comparison("RMSE", "on x", "A", "B", 1.0, 2.0, True)], compared(1, True)) == "on x"
    assert left_out(compared(1, True), compared(1, True)) is None


def test_rankings_leave_out_misprints_and_undefined_scores():
    """The misprinted 5.91 of NNG with 512 units on protein, and the mutual information of a point estimate."""
    assert len([key for key in tables._corrected(GRIDS["deep"]) if key[:3] == ("rmse", "NNG", "512")]) == 7
    for name in ("fsvi_fashion", "fsvi_cifar10", "fsvi_notmnist"):
        left = [metric for system, metric in tables._judged(GRIDS[name]) if system == "map"]
        assert "auroc_entropy" in str(left)
        assert "mutual_information" not in str(left)


def test_settings_of_ours_are_counted_apart():
    """A claim with a setting of ours also has an entry with the setting nearest to the paper's."""
    counted = status.counts(CONTENT)
    assert counted["claims"] + counted["variants"] == len(CONTENT["figures"])
    nearest = {(one["paper"], one["title"]) for one in CONTENT["figures"] if not one["variant"]}
    shared = [one for one in CONTENT["figures"] if one["variant"] and one["setting"]]
    assert len(shared) > 40
    assert {(one["paper"], one["title"]) for one in shared} <= nearest
    assert f"| all | {counted['not_shown']} |" in tables.CLAIMS_PAGE.read_text()


def test_failing_comparisons_are_told():
    """Failing comparisons are joined by system, metric and place; what all comparisons share is left out."""

    def compared(winner, loser, metric, place, holds):
        return Comparison(metric, place, winner, loser, 1.0, 2.0, holds)

    severities = [f"at severity {one}" for one in range(1, 6)]
    one = [compared("A", "B", "ECE", place, holds) for place, holds in zip(severities, (0, 1, 0, 0, 0), strict=True)]
    assert in_brief(one, []) == {"ours": "1 of 5", "fails": "at severities 1, 3, 4 and 5", "not_run": None}
    some = [
        compared("A", loser, "ECE", place, loser == "D" or place[-1] == "5") for loser in "BCD" for place in severities
    ]
    assert in_brief(some, ["E", "F"]) == {
        "ours": "7 of 15",
        "fails": "against B and C at severities 1 to 4",
        "not_run": "E or F",
    }
    two = [compared("A", "B", metric, f"on {name}", name == "x") for metric in ("AUROC", "AUPR") for name in "xyz"]
    assert in_brief(two, [])["fails"] == "in AUROC and AUPR on y and z"
    assert in_brief(one[:1], [])["fails"] is None
    assert in_brief([], ["E"]) == {"ours": None, "fails": None, "not_run": "E"}


def test_checks_follow_the_files(tmp_path, monkeypatch):
    """Where every stored number is another one, every check tells other numbers; where there are no files it is untested."""

    def other(value):
        if isinstance(value, dict):
            return {key: other(one) for key, one in value.items()}
        if isinstance(value, list):
            return [other(one) for one in value]
        if type(value) is int:
            return value + value % 97 * 1000 if value > 1000 else value  # a count
        if not isinstance(value, float) or round(value, 2) == value:  # 0.75 is a setting
            return value
        return value * (1.1 + int(abs(value) * 1e6) % 10)  # by different factors, since checks tell ratios too

    for place in ("papers/results", "benchmarks/results"):
        shutil.copytree(ROOT / place, tmp_path / place)
    for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        path.write_text("\n".join(json.dumps(other(json.loads(line))) for line in lines))
    for figure in LISTED["figures"]:
        if "check" in figure:
            shown, words = verdict(figure, tmp_path)
            _, real = verdict(figure, ROOT)
            assert words != real or shown is None, figure["claim"]
            assert verdict(figure, tmp_path / "nothing")[0] is None


def test_a_resnet_18_is_never_compared_with_a_resnet_50(tmp_path, monkeypatch):
    """The same file is picked up by its settings, not by its name; seeds are averaged within the recipe that has the most."""
    stored = json.loads((ROOT / "papers/results/inducing_weights/cifar10_resnet18_0.json").read_text())
    folder = tmp_path / "papers/results/inducing_weights"
    alone = {"scores": {"deterministic": stored["scores"]["deterministic"]}, "date": "2020-01-01", "seed": 2}
    for name, settings, more in (
        ("cifar10_resnet50_one_cycle_0.json", {"bottleneck": True, "epochs": 300}, {"seed": 0}),
        ("cifar10_resnet50/1/results.json", {"bottleneck": True, "epochs": 300}, {"seed": 1}),
        ("cifar10_older/results.json", {"bottleneck": True, "epochs": 400}, {"seed": 2, "date": "2020-01-01"}),
        ("cifar10_held_out/results.json", {"bottleneck": True, "epochs": 300}, {"seed": 3, "validation": 100}),
        ("cifar10_named_resnet50/results.json", {"epochs": 300}, {"seed": 4}),
        ("cifar10_of_its_own.json", {"bottleneck": True, "epochs": 200, "point_optimizer": "sgd"}, alone),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**stored, **more, "settings": {**stored["settings"], **settings}}
        if more is not alone:
            del (scores := dict(content["scores"]))["deterministic"]
            content["scores"] = scores
        path.write_text(json.dumps(content))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    found = tables.ours_of(GRIDS["table5"])
    runs = {key[0]: row["runs"] for key, row in found.items()}
    assert runs == {"ffg_u": 2, "ensemble_u": 2, "deterministic": 1}  # systems may have recipes of their own
    assert {row["runs"] for row in tables.ours_of(GRIDS["resnet18"]).values()} == {1}
    assert all(
        row["ours"] == pytest.approx(100 * stored["scores"][key[0]]["test"]["accuracy"])
        for key, row in found.items()
        if key[1] == "accuracy"
    )
    filled = Counter(
        cell["table"].partition(":")[0]
        for table in LISTED["tables"]
        if table.get("read") == "inducing_weights.classification"
        for cell in tables.cells(table)
        if cell["ours"] is not None
    )
    assert filled == {"Tables 2 and 5": 12, "Table 11": 15, "Table 12": 15, "Table 7": 4, "Table 15": 5, "Table 16": 5}


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
    assert f"{own['agrees']} of {own['compared']}" in line
    run = CliRunner().invoke(app, ["reproduce", "--status", "walsh-hadamard/table 2", "function-space"])
    assert run.exit_code == 0
    assert "log2(pi)" not in run.output
    assert "not_run" not in run.output
    assert "Figure 8; our context differs: more context inputs do not change the test accuracy: shown" in run.output
    assert any(
        line.split()[:2] == ["boston", "WHVI"] and line.split()[-3:] == ["no", "no", "20"]
        for line in run.output.splitlines()
    )
    run = CliRunner().invoke(app, ["reproduce", "--status", "nothing"])
    assert run.exit_code == 2
