"""A subnetwork posterior compared with laplace-torch: equal covariances, and time and memory of fit and predict.

    make bench-peers

runs this benchmark in a separate environment, because laplace-torch needs packages that conflict with the library's. Its time for a
ResNet-18 jumps between two and three images, so both sides of the jump are measured.
"""

import json
import resource
import statistics
import subprocess
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import Laplace, likelihoods, models, subnetwork

from .runs import parser
from .timing import clock, record

SUBNETWORK_SIZE = 500
CASES = {"mlp": ("mlp", 100), "resnet18": ("resnet18", 4), "resnet18_two_images": ("resnet18", 2)}
"""Network and number of examples of each case, for the fit and for the prediction."""

MAX_SECONDS = 60.0
"""Seconds after which no measurement is repeated."""


def problem(case: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, inputs, labels and the indices of its subnetwork."""
    torch.manual_seed(0)
    kind, size = CASES[case]
    if kind == "mlp":
        net: nn.Module = models.mlp([784, 256, 256, 10])
        x = torch.randn(size, 784)
    else:
        net = models.resnet18(variant="cifar", num_classes=10)
        x = torch.randn(size, 3, 32, 32)
    count = sum(parameter.numel() for parameter in net.parameters())
    return net.eval(), x, torch.randint(10, (len(x),)), torch.randperm(count)[:SUBNETWORK_SIZE].sort().values


def run(case: str, who: str, repeats: int) -> dict[str, Any]:
    """Time and peak memory of one library on one case, in this process."""
    warnings.simplefilter("ignore")
    net, x, y, index = problem(case)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
    with torch.no_grad():
        net(x)
    theirs: Any = None
    if who == "laplace-torch":
        from laplace.subnetlaplace import FullSubnetLaplace

        theirs = FullSubnetLaplace

    def fit() -> Any:
        if theirs is None:
            return Laplace(net, likelihoods.Categorical(), subnetwork.from_indices(index)).fit(loader)
        made = theirs(net, "classification", index)
        made.fit(loader)
        return made

    def predict(made: Any) -> Tensor:
        if theirs is None:
            return made.predict(x).probs
        return made(x, pred_type="glm", link_approx="probit")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: dict[str, list[float]] = {"fit": [], "predict": []}
    given: dict[str, Any] = {}
    for _ in range(repeats):
        times["fit"].append(clock(lambda: given.update(made=fit())))
        times["predict"].append(clock(lambda: given.update(probs=predict(given["made"]))))
        if sum(map(sum, times.values())) > MAX_SECONDS:
            break
    made, probs = given["made"], given["probs"]
    covariance = made.covariance_matrix() if theirs is None else made.posterior_covariance
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    torch.save((covariance, probs), f"peers-{case}-{who}.pt")
    return {"memory_mib": grown, **{name: statistics.median(values) for name, values in times.items()}}


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--one", nargs=2, metavar=("CASE", "LIBRARY"), help="measure one library in this process")
    chosen = options.parse_args()
    if chosen.one:
        print(json.dumps(run(*chosen.one, chosen.repeats)))
        return
    figures: dict[str, float] = {}
    for case in CASES:
        found = {}
        for who in ("bayesify", "laplace-torch"):
            command = [sys.executable, "-m", "benchmarks.peers", "--one", case, who, "--repeats", str(chosen.repeats)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[who] = json.loads(printed.splitlines()[-1])
        ours, theirs = found["bayesify"], found["laplace-torch"]
        tensors = {who: torch.load(f"peers-{case}-{who}.pt") for who in found}
        difference = max(
            float((mine - other).abs().max() / other.abs().max())
            for mine, other in zip(tensors["bayesify"], tensors["laplace-torch"], strict=True)
        )
        figures |= {
            f"{case}_memory_share": round(ours["memory_mib"] / theirs["memory_mib"], 4),
            f"{case}_largest_difference": difference,
        }
        for key, name in {"fit": "fit_seconds", "predict": "predict_seconds", "memory_mib": "memory_mib"}.items():
            figures[f"{case}_{name}"] = round(ours[key], 4)
            figures[f"{case}_{name}_laplace_torch"] = round(theirs[key], 4)
            if key != "memory_mib":
                figures[f"{case}_{key}_speedup"] = round(theirs[key] / ours[key], 2)
    record(
        "peers_laplace_cpu",
        figures,
        unit=f"laplace-torch's time / ours for a subnetwork of {SUBNETWORK_SIZE} weights, and our added peak memory / theirs",
        examples={case: size for case, (_, size) in CASES.items()},
    )


if __name__ == "__main__":
    main()
