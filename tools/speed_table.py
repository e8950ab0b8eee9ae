"""The tables of docs/speed.md, made from the stored results. Run this program after a benchmark."""

import json
from pathlib import Path
from typing import Any

from benchmarks import aims
from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
START, END = "<!-- speed: from benchmarks/results, by python -m tools.speed_table -->", "<!-- end of speed -->"
POSTERIORS = {"inducing": "`InducingWeights`, 64 x 64", "mean_field": "`MeanField`"}
NETWORKS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}
TITLES = [
    "",
    "a fresh draw, 5 at a time",
    "a fresh draw alone",
    "a draw that exists",
    "5 fresh draws in bfloat16",
    "training step",
]
COLUMNS = ("5_draws", "one_at_a_time", "existing_draws", "bf16/5_draws", "training_step")
ON_CPU = {
    "mlp_16_existing_draws": "MLP 784-256-256-10: 16 draws that already exist",
    "mlp_16_fresh_draws": "the MLP: 16 fresh draws, `MeanField`",
    "mlp_16_fresh_draws_antithetic": "the same in antithetic pairs",
    "mlp_mean_field_step": "the MLP: training step, one draw of the weights",
    "mlp_mean_field_step_local": "the same with local reparameterization",
    "mlp_16_draws_alone_rank_one": "the MLP: 16 fresh draws, `RankOne`, without their passes",
    "mlp_16_draws_alone_dropout": "the MLP: 16 fresh draws, `Dropout`, without their passes",
    "conv_16_existing_draws": "small convolutional network: 16 draws that already exist",
    "conv_16_fresh_draws": "the small convolutional network: 16 fresh draws, `MeanField`",
}


def tables() -> str:
    """The generated part of the page in Markdown. Each table names its machine and its command."""
    gpu, cpu = stored("resnets_gpu"), stored("foundation_cpu")
    rows = [
        [f"{title}, {name}", *(number(gpu["figures"].get(f"{network}/{posterior}/{column}")) for column in COLUMNS)]
        for network, title in NETWORKS.items()
        for posterior, name in POSTERIORS.items()
    ]
    parts = [
        f"Measured on {gpu['hardware']['gpu']} ({_when(gpu)}) by `{gpu['command']}`, in batches of {gpu['batch']} "
        f"({gpu['step_batch']} for training steps):",
        table(TITLES, rows),
        f"Measured on {cpu['hardware']['threads']} threads of a {cpu['hardware']['cpu']} ({_when(cpu)}) by `{cpu['command']}`:",
        table(
            ["", "ratio"],
            [[title, number(cpu["figures"][key])] for key, title in ON_CPU.items() if key in cpu["figures"]],
        ),
    ]
    return "\n\n".join([*parts, captured(), aims_table(), reasons()])


def aims_table() -> str:
    """Table of every aim of benchmarks/aims.toml, with the figure on each machine and its lower bound."""
    rows = []
    for aim in aims.aims():
        machines = ["", "", "H200"] if aims.on_gpu(aim) else [*aims.MACHINES.values(), ""]
        found = [(aims.stored(aim, machine), aims.stored(aim, machine, "floor")) for machine in machines if machine]
        floors = dict.fromkeys(f"{floor:.3g}" for _, floor in found if floor is not None)
        shown = iter(["" if figure is None else _marked(aim, figure) for figure, _ in found])
        cells = [next(shown) if machine else "" for machine in machines]
        rows.append([aim["what"], f"{aim['aim']:g}", " / ".join(floors), *cells])
    derived = [f"- {aim['floor']:g}: {aim['floor_from']}." for aim in aims.aims() if "floor_from" in aim]
    return (
        "The aims are in `benchmarks/aims.toml`; `make bench` reports which of them your machine meets. "
        "Figures that miss an aim are bold:\n\n"
        + table(["", "aim", "floor", *aims.MACHINES, "H200"], rows)
        + "\n\nThese floors were derived, not measured:\n\n"
        + "\n".join(derived)
    )


def reasons() -> str:
    """Table of the reasons why figures miss their aims, with the profiles that show them."""
    rows = []
    for aim in aims.aims():
        for machine in ["H200"] if aims.on_gpu(aim) else aims.MACHINES.values():
            figure = aims.stored(aim, machine)
            if figure is None or aims.is_met(aim, figure):
                continue
            title = f"{aim.get('short', aim['what'])}: {figure:.3g}, aim {aim['aim']:g}"
            title += "" if aims.on_gpu(aim) else {name: f", {key}" for key, name in aims.MACHINES.items()}[machine]
            cells = profile_cells(aim, machine)
            rows.append([title, aim.get("reason", ""), *cells])
    return (
        "The next table explains why the figures in bold miss their aims, with profiles of the timed calls unless the reason says "
        "otherwise (`benchmarks/profiles.py`). Times are in milliseconds (for draws, per pass), and the plain network's time "
        "follows the slash. `host` is the time until everything is launched, and `waits` is the whole minus all kernels of the "
        "device. `whole` is the fastest of "
        "twelve calls, and a figure is the median of many, so their ratios differ if the host is the bottleneck. "
        "`benchmarks/results/profiles_*.json` lists kernels by name.\n\n"
        + table(["", "reason", "whole", "host", "waits", "kernels that take longer"], rows)
    )


def profile_cells(aim: dict[str, Any], machine: str) -> list[str]:
    """Total time, host time, waiting time of the device, and the kernel groups that exceed the plain network's most."""
    name, _, key = aim.get("profile", "").partition(":")
    on_gpu = aims.on_gpu(aim)
    files = ("profiles_gpu", "profiles_networks_gpu") if on_gpu else ("profiles_cpu",)
    paths = [aims.folder_of(aims.RESULTS, file, machine) / f"{file}.json" for file in files]
    found = [json.loads(path.read_text())["figures"].get(name, {}) for path in paths if path.exists()]
    row = next((one for one in found if key in one), None)
    if row is None:
        return [""] * 4
    ours, plain = row[key], row["plain"]
    if not on_gpu:
        parts = ("; ".join(f"{part} {ms:.2g}" for part, ms in each.items()) for each in (ours, plain))
        return ["", "", "", " / ".join(parts)]
    both = [
        " / ".join(f"{each[part]:.3g}" for each in (ours, plain) if part in each)
        for part in ("ms", "host_ms", "idle_ms")
    ]
    both[0] += f" = {ours['ms'] / plain['ms']:.2f}"
    more = {group: ms - plain["groups"].get(group, 0.0) for group, ms in ours["groups"].items()}
    most = sorted(more.items(), key=lambda item: -item[1])[:4]
    shown = "; ".join(f"{group} +{ms:.2g}" for group, ms in most if ms > 0.004 * plain["kernels_ms"])
    return [*both, f"{shown} ({ours['kernels']:.0f} kernels / {plain['kernels']:.0f})"]


def _marked(aim: dict[str, Any], figure: float) -> str:
    return f"{figure:.3g}" if aims.is_met(aim, figure) else f"**{figure:.3g}**"


def captured() -> str:
    """Table of steps of `fit` on a GPU compared with steps of a plain network in a hand-written loop."""
    found = stored("captured_steps")
    names = {"mlp_784_512_512_10": "MLP 784-512-512-10", "resnet18_bf16": "ResNet-18, bfloat16, channels last"}
    rows = []
    for key, title in names.items():
        figures = found["figures"][key]
        cells = [
            f"{number(figures[f'{posterior}_over_plain'])} / {number(figures[f'{posterior}_over_plain_on_device'])}"
            for posterior in ("mean_field", "inducing")
        ]
        rows.append([title, *cells])
    parts = [
        "The next table shows the time of a step of `fit`, divided by the time of a step of the plain network in an eager loop "
        "with Adam. The first number includes the loader; for the second, the data are already on the GPU. Measured on "
        f"{found['hardware']['gpu']} ({_when(found)}) by `{found['command']}`, in batches of {found['batch']}:",
        table(["", "`MeanField`", "`InducingWeights`, 64 x 64"], rows),
    ]
    return "\n\n".join([*parts, *([f"They were {found['note']}."] if "note" in found else [])])


def stored(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return content


def _when(found: dict[str, Any]) -> str:
    """Torch version, revision (if known) and date of a run."""
    revision = found["versions"].get("revision")
    return f"torch {found['versions']['torch']}, {f'revision {revision}, ' if revision else ''}{found['date']}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text(), START, END, tables()))


if __name__ == "__main__":
    main()
