"""Active learning on MNIST with every image three times: labels needed for 95 % of the full accuracy.

The pool is the first 5,000 training images, each three times with Gaussian noise of std 0.1 (Kirsch et al. 2019, section 4.2).
Accuracy is measured on the test images. A convolutional network under MC dropout is trained from scratch on 20 labels, then on 10
more labels each round, chosen at random, by predictive entropy, by BALD, or by BatchBALD. The full accuracy is that of the same
network trained on all labels of the pool. `--choose` scores the KL's weight with 20 and 150 random labels on 5,000 training images
outside the pool, with separate seeds. Each round is appended to `--rounds`, and a killed run resumes from its file in `--folder`.

python -m benchmarks.active_learning --workers 4                       # a GPU
python -m benchmarks.active_learning --choose > kl-weights.jsonl
python -m benchmarks.active_learning --small --folder build/al --rounds build/al.jsonl --no-summary
"""

import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import acquisition, likelihoods, posteriors
from bayesify.datasets import images
from tools import markdown

from .runs import add_row, parser, read_rows
from .timing import record, revision, revisions

METHODS = ("batch_bald", "bald", "entropy", "random")
NUM_START_LABELS, LABELS_PER_ROUND, NUM_DRAWS = 20, 10, 32
KL_WEIGHT = 1e-3


def load(small: bool, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels of the pool and of the test set."""
    data = images.load("mnist", download=False).first(500 if small else 5_000, 500 if small else 10_000)
    x, test_x = (torch.from_numpy(part).to(device).float() / 255 for part in (data.train_images, data.test_images))
    y, test_y = (torch.from_numpy(part).to(device).long() for part in (data.train_labels, data.test_labels))
    noise = torch.randn(3 * len(x), *x.shape[1:], generator=torch.Generator().manual_seed(0)).to(device)
    return x.repeat(3, 1, 1, 1) + 0.1 * noise, y.repeat(3), test_x, test_y


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(x: Tensor, y: Tensor, seed: int, steps: int, kl_weight: float = KL_WEIGHT) -> bayesify.BayesianNetwork:
    torch.manual_seed(seed)
    bnn = bayesify.bayesianize(network(), posteriors.Dropout(0.25), likelihood=likelihoods.Categorical()).to(x.device)
    batch = min(64, len(x))
    loader = DataLoader(TensorDataset(x, y.to(x.device)), batch_size=batch, shuffle=True, drop_last=True)
    epochs = -(-steps // len(loader))
    options = {"epochs": epochs, "learning_rate": 1e-3, "kl_weight": kl_weight}
    bayesify.fit(bnn, loader, **options, seed=seed, progress=False)
    return bnn


def accuracy(model: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    found = model.predict(x, 32, generator=torch.Generator().manual_seed(0), memory="2GiB")
    return {"accuracy": float((found.labels == y).float().mean()), "nll": float(-found.log_prob(y).mean())}


def run(method: str, seed: int, rounds: int, folder: Path, file: Path, small: bool) -> None:
    """One run over the pool. The method `full` trains on all labels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    x, y, test_x, test_y = load(small, device)
    begin, counts = time.perf_counter(), [len(x)]

    def trained(x: Tensor, y: Tensor, seed: int) -> Any:
        counts.append(len(x))
        return train(x, y, seed, 30 if small else 300)

    def evaluate(model: Any) -> dict[str, float]:
        scores = accuracy(model, test_x, test_y)
        seconds = time.perf_counter() - begin
        entry = {"method": method, "seed": seed, "labels": counts[-1], **scores, "seconds": seconds}
        entry["revision"] = revision()
        add_row(file, entry)
        return scores

    if method == "full":
        evaluate(train(x, y, seed, 60 if small else 3000))
        return
    options: dict[str, Any] = {"num_draws": 8 if small else NUM_DRAWS}
    choose = {
        "random": acquisition.at_random,
        "entropy": acquisition.by_score(attrgetter("entropy"), memory="2GiB", **options),
        "bald": acquisition.by_score(acquisition.bald, memory="2GiB", **options),
        "batch_bald": acquisition.by_batch_bald(memory="2GiB", num_configurations=5_000, **options),
    }[method]
    start = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:NUM_START_LABELS].tolist()
    acquisition.label_pool(
        trained,
        lambda indices: y[indices.to(device)].cpu(),
        x,
        choose,
        start=start,
        size=LABELS_PER_ROUND,
        rounds=rounds,
        evaluate=evaluate,
        path=folder / f"{method}-{seed}.safetensors",
        seed=1000 * seed,
    )


def choose_kl_weight(small: bool) -> None:
    """Accuracy by the KL's weight on training images outside the pool, one JSON line each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = images.load("mnist", download=False)
    count = 500 if small else 5_000
    x = torch.from_numpy(data.train_images[: 2 * count]).to(device).float() / 255
    y = torch.from_numpy(data.train_labels[: 2 * count]).to(device).long()
    for seed in (100, 101, 102):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)
        for labels in (NUM_START_LABELS, 150):
            for weight in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
                model = train(x[order[:labels]], y[order[:labels]], seed, 30 if small else 300, weight)
                scores = accuracy(model, x[count:], y[count:])
                print(json.dumps({"kl_weight": weight, "labels": labels, "seed": seed, **scores}), flush=True)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Labels to reach 95 % of the full accuracy and accuracy by number of labels, by method and seed."""
    full = {entry["seed"]: entry["accuracy"] for entry in lines if entry["method"] == "full"}
    found: dict[str, Any] = {"full accuracy": {str(seed): full[seed] for seed in sorted(full)}}
    for method in METHODS:
        reached, last = [], []
        for seed in sorted(full):
            mine = {e["labels"]: e["accuracy"] for e in lines if (e["method"], e["seed"]) == (method, seed)}
            counts = [count for count, score in sorted(mine.items()) if score >= 0.95 * full[seed]]
            reached.append(counts[0] if counts else None)
            last.append({"labels": max(mine), "accuracy": mine[max(mine)]} if mine else None)
        known = [count for count in reached if count is not None]
        median = statistics.median(known) if known and len(known) == len(reached) else None
        curve = {}
        most = max((entry["labels"] for entry in lines if entry["method"] == method), default=0)
        for count in range(NUM_START_LABELS + 30, most + 1, 50):
            scores = [e["accuracy"] for e in lines if (e["method"], e["labels"]) == (method, count)]
            curve[str(count)] = statistics.mean(scores)
        found[method] = {"labels to reach 95 %": reached, "median": median, "mean accuracy": curve, "last": last}
    return found


def table(figures: dict[str, Any]) -> str:
    """The guide's table: labels needed by each seed, in Markdown."""
    rows = []
    for method in METHODS:
        found = figures[method]
        most = [f"over {last['labels']}" if last else "not finished" for last in found["last"]]
        counts = [str(count or end) for count, end in zip(found["labels to reach 95 %"], most, strict=True)]
        last = [f"{last['accuracy']:.3f} ({last['labels']} labels)" for last in found["last"] if last]
        rows.append([method.replace("_", " "), ", ".join(counts), ", ".join(last)])
    return markdown.table(["", "labels for 95 %, by seed", "accuracy at the last round"], rows)


def main() -> None:
    files = {"folder": Path("active-learning"), "rounds": Path("active-learning.jsonl")}
    options = parser(__doc__, "workers", "small", "no_summary", seeds=3, num_rounds=28, choose=False, **files)
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = options.parse_args()
    if given.choose:
        choose_kl_weight(given.small)
        return
    given.folder.mkdir(exist_ok=True, parents=True)
    known = {entry["seed"] for entry in read_rows(given.rounds) if entry["method"] == "full"}
    jobs = [("full", seed) for seed in range(given.seeds) if seed not in known]
    jobs += [(method, seed) for seed in range(given.seeds) for method in given.methods]
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        rest = (given.num_rounds, given.folder, given.rounds, given.small)
        waiting = {pool.submit(run, *job, *rest): job for job in jobs}
        for future in as_completed(waiting):
            print(*waiting[future], future.exception() or "done", flush=True)
    if not given.no_summary:
        lines = read_rows(given.rounds)
        record("active_learning", summary(lines), revisions=revisions(lines))


if __name__ == "__main__":
    main()
