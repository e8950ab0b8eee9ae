"""Fine-tuning by low-rank adapters: accuracy, NLL and calibration of plain LoRA and of posteriors over the adapter's weights.

A language model of bytes is trained from scratch on the source code of Python's standard library and of torch. Adapters of rank 8
on its attention maps then learn to classify snippets of four other folders of torch by folder, from 256 examples. All other weights
are frozen, so the posterior covers exactly the trained weights. Settings were chosen (`--choose`) with other seeds, on files that
the table does not use.

python -m benchmarks.lora --file build/lora.jsonl                                   # the table; three seeds, a GPU
python -m benchmarks.lora --choose --file build/choices.jsonl                       # settings, on other files
python -m benchmarks.lora --cost                                                    # time and memory of a step, a GPU
python -m benchmarks.lora --model NAME_OR_PATH --data TABLE.csv --file build/mine.jsonl  # your model; columns text and label

Rows in the file are not run again. At the end, the table goes to benchmarks/results/lora.json. This file keeps its rows of other
methods and seeds; the table and the choices do not replace each other. With several processes (`--part`), each writes all rows of
the file.
"""

import copy
import csv
import hashlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayesify
from bayesify import Laplace, metrics, posteriors
from bayesify.adapters import bayesianize_lora
from bayesify.arguments.installing import load
from bayesify.baselines import fit_members
from tools import markdown

from .lora_model import CLASSES, Decoder, Rows, pretrain, python_text, snippets, with_adapters
from .runs import add_row, parser, read_rows
from .timing import RESULTS, adam_step, clock, record, revision, synchronize

NUM_DRAWS, NUM_MEMBERS = 32, 5


@dataclass(frozen=True)
class Setting:
    """Training settings of a method.

    Args:
        posterior: Posterior of the adapter's weights, given to `bayesianize_lora`.
        epochs: Number of passes over the examples.
        rate: Learning rate.
        kl_weight: Factor on the KL.
        first: Number of passes as plain LoRA, at a rate of 1e-3, before the training of the posterior.
    """

    posterior: Any
    epochs: int
    rate: float
    kl_weight: float = 0.0
    first: int = 0


SETTINGS = {
    "LoRA": Setting("point", 20, 3e-3),
    "LoRA, fewer epochs": Setting("point", 10, 1e-3),
    "dropout": Setting(posteriors.Dropout(0.1, first_layer=True), 20, 3e-3),
    "ensemble": Setting(posteriors.Ensemble(NUM_MEMBERS), 20, 3e-3),
    "mean-field": Setting(posteriors.MeanField(init_std=0.03), 20, 1e-3, 0.001, 20),
    "k-tied": Setting(posteriors.KTied(1, init_std=0.03), 20, 1e-3, 0.01, 20),
    "inducing": Setting("inducing", 20, 3e-2, 0.3, 20),
}
LAPLACE_BY_SIZE = {"covariance": "kronecker", "prior_precision": "size", "num_samples": 4}
LAPLACE: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "Laplace, LoRA": (["*lora_*"], LAPLACE_BY_SIZE, False),
    "Laplace, LoRA, evidence": (["*lora_*"], LAPLACE_BY_SIZE, True),
    "Laplace, last layer": ("last_layer", {}, False),
    "Laplace, last layer, size": ("last_layer", LAPLACE_BY_SIZE, False),
    "Laplace, last layer, evidence": ("last_layer", LAPLACE_BY_SIZE, True),
}
"""Weights under the posterior, options of `Laplace`, and whether the evidence chooses a factor on the prior precision."""
METHODS = (*SETTINGS, *LAPLACE)


@dataclass
class LoraProblem:
    """A model with fresh adapters for each seed, and examples.

    Args:
        make: Function from a seed to the model.
        train: Function from a seed to the training examples.
        test: Inputs and labels of the test examples.
        more: Globs of further weights under the posterior, in addition to the adapter's.
    """

    make: Callable[[int], nn.Module]
    train: Callable[[int], Dataset[Any]]
    test: tuple[Any, Tensor]
    more: tuple[str, ...] = ()


def base_model(folder: Path, width: int, depth: int, length: int, steps: int, batch: int, device: str) -> Decoder:
    """The language model, trained once and stored in a file."""
    torch.manual_seed(0)
    decoder = Decoder(width, depth, width // 64 or 1, length).to(device)
    text = python_text()
    key = hashlib.sha256(bytes(text.numpy()) + repr((width, depth, length, steps, batch)).encode()).hexdigest()[:16]
    path = folder / f"lora-base-{key}.pt"
    if path.exists():
        decoder.load_state_dict(torch.load(path, map_location=device))
    else:
        begin, losses = time.perf_counter(), pretrain(decoder, text, steps, batch, length)
        print("pretraining:", losses, f"{time.perf_counter() - begin:.0f} s", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(decoder.state_dict(), path)
    return decoder.eval()


def own_problem(base: Decoder, split: str, count: int, tests: int, length: int, device: str) -> LoraProblem:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return with_adapters(copy.deepcopy(base).cpu(), 8, 16.0, len(CLASSES)).to(device)

    def rows(name: str, number: int, seed: int) -> tuple[Tensor, ...]:
        return tuple(part.to(device) for part in snippets(name, number, length, seed))

    return LoraProblem(make, lambda seed: TensorDataset(*rows("train", count, seed)), rows(split, tests, 0))  # type: ignore[arg-type]


def user_problem(model: str, data: Path, count: int, length: int, device: str) -> LoraProblem:
    """A model of transformers with peft's adapters. A fifth of the table is for testing, `count` others for training."""
    transformers = load("transformers", extra="lora", owner="benchmarks.lora")
    peft = load("peft", extra="lora", owner="benchmarks.lora")
    with data.open(newline="") as lines:
        read = csv.DictReader(lines)
        if not {"text", "label"} <= set(read.fieldnames or ()):
            raise ValueError(f"benchmarks.lora: {data} has columns {read.fieldnames}; give the columns text and label")
        table = [(row["text"], row["label"]) for row in read]
    random.Random(0).shuffle(table)
    tests = len(table) // 5
    if count > len(table) - tests:
        raise ValueError(f"benchmarks.lora: --count {count} exceeds the {len(table) - tests} training rows; give fewer")
    labels = sorted({label for _, label in table})
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def rows(part: list[tuple[str, str]]) -> tuple[dict[str, Tensor], Tensor]:
        options = {"truncation": True, "max_length": length, "padding": "max_length", "return_tensors": "pt"}
        encoded = tokenizer([text for text, _ in part], **options)
        x = {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}
        return x, torch.tensor([labels.index(label) for _, label in part], device=device)

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(labels))
        network.config.pad_token_id = tokenizer.pad_token_id
        config = peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear")
        return peft.get_peft_model(network, config).to(device).eval()

    return LoraProblem(
        make,
        lambda seed: Rows(*rows(random.Random(seed).sample(table[tests:], count))),
        rows(table[:tests]),
        ("*modules_to_save*",),
    )


def trained(problem: LoraProblem, setting: Setting, seed: int) -> bayesify.BayesianNetwork:
    torch.manual_seed(seed)
    model, rows = problem.make(seed), problem.train(seed)
    loader = DataLoader(rows, batch_size=min(32, len(rows)), shuffle=True, drop_last=True)  # type: ignore[arg-type]
    steps = [Setting("point", setting.first, 1e-3)] if setting.first else []
    for step in (*steps, setting):
        bnn = bayesianize_lora(model, step.posterior, names=("*lora_*", *problem.more))
        options: dict[str, Any] = {"learning_rate": step.rate, "kl_weight": step.kl_weight}
        # Train members one by one: torch 2.11's fused attention has no gradient for several at once on a GPU.
        fit = fit_members if isinstance(step.posterior, posteriors.Ensemble) else bayesify.fit
        fit(bnn, loader, epochs=step.epochs, **options, seed=seed, progress=False)
        model = bnn.mean_network() if step is not setting else model
    return bnn


def scores(predict: Callable[[Any], Any], test: tuple[Any, Tensor]) -> dict[str, float]:
    found = metrics.evaluate(predict(test[0]), test[1])
    return {key: round(found[key], 4) for key in ("accuracy", "nll", "ece", "brier")}


def judged(bnn: bayesify.BayesianNetwork, test: tuple[Any, Tensor]) -> dict[str, float]:
    found = scores(lambda x: bnn.predict(x, NUM_DRAWS, generator=torch.Generator().manual_seed(0), memory="4GiB"), test)
    return {**found, "numbers per weight": numbers(bnn)}


def curved(
    model: nn.Module, subset: Any, options: dict[str, Any], evidence: bool, problem: LoraProblem, seed: int
) -> dict[str, Any]:
    """Laplace over some weights of a trained model."""
    if isinstance(model, Decoder):
        model.head.requires_grad_(True)  # Laplace leaves out frozen weights
    laplace = Laplace(model, "categorical", subset, **options, memory="4GiB")
    laplace.fit(DataLoader(problem.train(seed), batch_size=32))
    factor = laplace.tune_prior_precision() if evidence else 1.0
    found = scores(lambda x: laplace.predict(x, generator=torch.Generator().manual_seed(0)), problem.test)
    return {**found, "prior factor": round(factor, 5), "log evidence": round(float(laplace.log_evidence()), 1)}


def run(
    problem: LoraProblem,
    methods: Iterable[str],
    seeds: Iterable[int],
    part: int,
    parts: int,
    known: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """One share of the table's rows (one per method and seed), without the rows that are already known."""
    plain: dict[int, nn.Module] = {}
    done = {identity(row) for row in known}
    for seed, method in list(itertools.product(seeds, methods))[part::parts]:
        if (method, seed, "{}") in done:
            continue
        begin = time.perf_counter()
        if method in SETTINGS:
            bnn = trained(problem, SETTINGS[method], seed)
            found = judged(bnn, problem.test)
            if method == "LoRA":
                plain[seed] = bnn.mean_network()
        else:
            if seed not in plain:
                plain[seed] = trained(problem, SETTINGS["LoRA"], seed).mean_network()
            found = curved(copy.deepcopy(plain[seed]), *LAPLACE[method], problem, seed)
        yield {"method": method, "seed": seed, **found, "seconds": round(time.perf_counter() - begin, 1)}


def narrow(name: str, **options: Any) -> list[dict[str, Any]]:
    """Settings with small KL weights, whose scales are a quarter of a fresh A's scale, or almost equal to it. An example has 384
    weights."""
    return [
        {"posterior": {"name": name, "init_std": std, **options}, "kl_weight": weight, "rate": 1e-3}
        for std, weight in itertools.product((0.01, 0.03), (1e-3, 1e-2))
    ]


CHOICES: dict[str, list[dict[str, Any]]] = {
    "LoRA": [{"epochs": epochs, "rate": rate} for epochs in (10, 20, 40) for rate in (1e-3, 3e-3)],
    "mean-field": narrow("mean_field"),
    "k-tied": narrow("k_tied", rank=1),
    "inducing": [{"kl_weight": weight, "rate": rate} for weight in (0.3, 0.1, 0.03, 0.01) for rate in (1e-2, 3e-2)],
}
"""Settings to choose from."""


def identity(row: dict[str, Any]) -> tuple[str, int, str]:
    """Identity of a row: method, seed, and changed settings."""
    return row["method"], row["seed"], json.dumps(row.get("change", {}))


def choices(
    problem: LoraProblem,
    methods: Iterable[str],
    seeds: Iterable[int],
    part: int,
    parts: int,
    known: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Scores of one share of the settings, without those that are already known."""
    done = {identity(row) for row in known}
    grids = [(method, CHOICES[method]) for method in methods if method in CHOICES]
    tried = [(seed, method, change) for seed in seeds for method, grid in grids for change in grid]
    random.Random(0).shuffle(tried)
    for seed, method, change in tried[part::parts]:
        if (method, seed, json.dumps(change)) in done:
            continue
        begin = time.perf_counter()
        found = judged(trained(problem, replace(SETTINGS[method], **change), seed), problem.test)
        shown = {"method": method, "seed": seed, "change": change, **found}
        yield {**shown, "seconds": round(time.perf_counter() - begin, 1)}


def choose(lines: Iterable[str]) -> None:
    """Adopt the best settings over the tried seeds: by accuracy for plain LoRA, dropout and ensemble, by NLL for all others."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for entry in map(json.loads, lines):
        found.setdefault(entry["method"], {}).setdefault(json.dumps(entry["change"]), []).append(entry)
    for method, tried in found.items():
        by_nll = min(tried, key=lambda change: statistics.mean(entry["nll"] for entry in tried[change]))
        if method == "LoRA":
            best = max(tried, key=lambda change: statistics.mean(entry["accuracy"] for entry in tried[change]))
            for name in ("LoRA", "dropout", "ensemble"):
                SETTINGS[name] = replace(SETTINGS[name], **json.loads(best))
            method = "LoRA, fewer epochs"
        SETTINGS[method] = replace(SETTINGS[method], **json.loads(by_nll))
    print("settings:", {name: repr(setting) for name, setting in SETTINGS.items()}, flush=True)


def cost(
    device: str, width: int = 768, depth: int = 12, length: int = 512, batch: int = 16, vocabulary: int = 32_000
) -> Any:
    """Time and memory of a step on a decoder of GPT-2's shape and, if its packages are installed, on GPT-2 with adapters."""
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]
    decoder = with_adapters(Decoder(width, depth, width // 64, length, vocabulary), 8, 16.0).to(device)
    figures = {"decoder": cost_of(decoder, x, y, device)}
    print(json.dumps(figures), flush=True)
    try:
        import peft
        import transformers
    except ImportError:
        return figures
    sizes = {"n_embd": width, "n_layer": depth, "n_head": width // 64, "n_positions": length, "vocab_size": vocabulary}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"])
    figures["GPT-2"] = cost_of(peft.get_peft_model(network, config).to(device), {"input_ids": x}, y, device)
    return figures


def cost_of(model: nn.Module, x: Any, y: Tensor, device: str) -> dict[str, Any]:
    """Milliseconds and peak memory of a step in bfloat16 by autocast. Steps of posteriors and of plain LoRA alternate."""

    def plain() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(**x).logits if isinstance(x, dict) else model(x)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def bayesian(bnn: bayesify.BayesianNetwork) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                return -bnn.elbo(x, y, num_data=10_000) / 10_000 / y.shape[1]

        return loss

    steps, networks = {"LoRA": adam_step(model, plain)}, {}
    for method in ("mean-field", "k-tied", "inducing"):
        networks[method] = bayesianize_lora(model, SETTINGS[method].posterior)
        steps[method] = adam_step(networks[method], bayesian(networks[method]))
    times: dict[str, list[float]] = {method: [] for method in steps}
    for place in range(25):
        for method, step in steps.items():
            seconds = clock(step)
            times[method] += [seconds] if place >= 5 else []  # the first steps create the optimizers' state
    figures: dict[str, Any] = {}
    for method, step in steps.items():
        figures[method] = {"ms": round(1e3 * statistics.median(times[method]), 3)}
        ratio = [mine / base for mine, base in zip(times[method], times["LoRA"], strict=True)]
        figures[method]["time"] = round(statistics.median(ratio), 4)
        if device == "cuda":
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            synchronize()
            figures[method]["peak MiB"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            figures[method]["memory"] = round(figures[method]["peak MiB"] / figures["LoRA"]["peak MiB"], 4)
        if method in networks:
            figures[method]["numbers per weight"] = numbers(networks[method])
    return figures


def numbers(bnn: bayesify.BayesianNetwork) -> float:
    """Trained parameters, including point estimates, per weight that plain LoRA trains."""
    point = sum(value.numel() for value in bnn.network.parameters() if value.requires_grad)
    weights = sum(weight.numel for weight in bnn.weights.values())
    return round(bayesify.count_parameters(bnn) / (point + weights), 4)


def flat(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Numbers of nested dicts with their paths of keys."""
    if not isinstance(figures, dict):
        yield path, figures
        return
    for key, value in figures.items():
        yield from flat(value, (*path, key))


def summarize(rows: list[dict[str, Any]], part: str) -> None:
    """Write rows or choices to the committed results, replacing entries of the same identity."""
    found = json.loads((RESULTS / "lora.json").read_text())["figures"]
    merged = {identity(row): row for row in (*found.get(part, []), *rows)}
    found[part] = sorted(merged.values(), key=lambda row: (METHODS.index(row["method"]), row["seed"]))
    record("lora", found)


def table(figures: dict[str, Any]) -> str:
    """The guide's table in Markdown: means over the finished seeds, and each seed's ECE."""
    seeds = sorted({entry["seed"] for entry in figures["rows"]})
    rows = []
    for method in METHODS:
        found = [entry for entry in figures["rows"] if entry["method"] == method]
        if not found:
            continue
        by_seed = {entry["seed"]: f"{entry['ece']:.3f}" for entry in found}
        mean = {key: statistics.mean(entry[key] for entry in found) for key in ("accuracy", "nll", "ece")}
        each = ", ".join(by_seed.get(seed, "–") for seed in seeds)
        numbers = f"{found[0]['numbers per weight']:.2f}" if "numbers per weight" in found[0] else "curvature"
        rows.append([method, *(f"{value:.3f}" for value in mean.values()), each, numbers])
    return markdown.table(["", "accuracy", "NLL", "ECE", "ECE by seed", "numbers per adapter weight"], rows)


def cost_table(figures: dict[str, float]) -> str:
    """The guide's second table in Markdown: steps compared with plain LoRA's."""
    keys = ("time", "memory", "numbers per weight")
    lines = [
        [f"{model}, {method}", *(f"{figures[f'{model}, {method}, {key}']:.2f}" for key in keys)]
        for model in ("GPT-2", "decoder")
        for method in ("mean-field", "k-tied", "inducing")
    ]
    return markdown.table(["step compared with plain LoRA's", "time", "memory", "numbers per adapter weight"], lines)


def main() -> None:
    files = {"file": Path("build/lora.jsonl"), "folder": Path("build")}  # of rows, and of the language model
    sizes = {
        "count": 256,
        "length": 256,
        "steps": 3000,
        "tests": 2000,
    }  # examples, their tokens, pretraining, test examples
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser(__doc__, "part", "small", "no_summary", device=device, seeds=3, first_seed=0, **files, **sizes)
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options.add_argument("--choose", action="store_true")
    options.add_argument("--chosen", type=Path, help="file that --choose wrote; its best settings are used")
    options.add_argument("--cost", action="store_true")
    options.add_argument("--model", help="name or path of a model for transformers")
    options.add_argument("--data", type=Path, help="CSV file with columns text and label")
    given = options.parse_args()
    torch.set_float32_matmul_precision("high")
    if given.cost:
        small = {"width": 64, "depth": 2, "length": 32, "batch": 4, "vocabulary": 256} if given.small else {}
        figures = cost(given.device, **small)
        print(json.dumps(figures), flush=True)
        if not given.no_summary and not given.small:
            record("lora_gpu", {", ".join(path): value for path, value in flat(figures)})
        return
    if given.model:
        if given.data is None:
            options.error("--model needs --data, a CSV file with columns text and label")
        problem = user_problem(given.model, given.data, given.count, given.length, given.device)
    else:
        shape = (64, 2, given.length, 300, 16) if given.small else (256, 6, given.length, given.steps, 64)
        base = base_model(given.folder, *shape, given.device)
        split = "choice" if given.choose else "test"
        problem = own_problem(base, split, given.count, given.tests, given.length, given.device)
    first = given.first_seed + (100 if given.choose else 0)
    seeds = range(first, first + given.seeds)
    if given.chosen:
        choose(given.chosen.read_text().splitlines())
    found = choices if given.choose else run
    for entry in found(problem, given.methods, seeds, *given.part, read_rows(given.file)):
        entry["revision"] = revision()
        add_row(given.file, entry)
        print(json.dumps(entry), flush=True)
    rows = read_rows(given.file)
    if not given.choose:
        print(table({"rows": rows}))
    if not (given.no_summary or given.small or given.model):
        summarize(rows, "choices" if given.choose else "rows")


if __name__ == "__main__":
    main()
