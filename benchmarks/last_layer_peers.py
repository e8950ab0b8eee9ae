"""Last-layer Laplace with many classes, compared with laplace-torch: seconds, memory, and its error where it does not run.

python -m benchmarks.last_layer_peers --site FOLDER    # FOLDER: laplace-torch by `pip install --target`, if it is not installed

Each cell is a separate process with a limit of memory and of time. The network is a ResNet-18 of width 16 on images of 32 x 32,
64 to fit and 32 to predict. Calls have default arguments (laplace-torch: linearized predictions with the probit link). Seconds are
CPU time on one thread.
"""

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from bayesify import Laplace, likelihoods, models
from benchmarks.runs import Row, parser
from benchmarks.timing import clock, record

CLASSES, STRUCTURES = (10, 100, 1000), ("kronecker", "diagonal")
NUM_FITTED, NUM_PREDICTED = 64, 32


def work(library: str, structure: Any, classes: int) -> Row:
    """CPU seconds for fitting and predicting, and the peak memory of the process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = models.resnet18("cifar", classes, width=16).eval()
    x, y = torch.randn(NUM_FITTED, 3, 32, 32), torch.randint(classes, (NUM_FITTED,))
    few = x[:NUM_PREDICTED]
    with torch.no_grad():
        net(few)
        found: Row = {"pass_s": min(clock(lambda: net(x), time.process_time) for _ in range(3))}
    before = peak()
    if library == "bayesify":
        ours = Laplace(net, likelihoods.Categorical(), subset="last_layer", covariance=structure)
        found["fit_s"] = clock(lambda: ours.fit([(x, y)]), time.process_time)
        found["predict_s"] = clock(lambda: ours.predict(few).probs, time.process_time)
    else:
        from laplace import Laplace as Theirs

        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=NUM_FITTED)
        name = {"kronecker": "kron", "diagonal": "diag"}[structure]
        theirs = Theirs(net, "classification", subset_of_weights="last_layer", hessian_structure=name)
        found["fit_s"] = clock(lambda: theirs.fit(loader), time.process_time)
        print(json.dumps(found), flush=True)  # kept if predicting fails
        found["predict_s"] = clock(lambda: theirs(few, pred_type="glm", link_approx="probit"), time.process_time)
    return found | {"added_gib": peak() - before}


def peak() -> float:
    """Peak memory of the process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run(library: str, structure: str, classes: int, options: Any) -> Row:
    """Run a cell in a separate process, and keep its error message if it fails."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.last_layer_peers",
        "--cell",
        library,
        structure,
        str(classes),
    ]
    paths = [path for path in (os.environ.get("PYTHONPATH"), options.site) if path]
    limit = int(options.gib * 2**30)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=options.each,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode().strip().splitlines()
        return {**(json.loads(said[-1]) if said else {}), "said": f"not done after {options.each:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: Row = json.loads(lines[-1]) if lines else {}
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        found["said"] = errors[-1][:300] if errors else f"ended with {done.returncode}"
    return found | {"process_s": time.perf_counter() - start}


def main() -> None:
    given = parser(__doc__, site="", gib=12.0, each=120.0, cell=[""], classes=list(CLASSES))
    options = given.parse_args()
    if options.cell[0]:
        library, structure, classes = options.cell
        print(json.dumps(work(library, structure, int(classes))), flush=True)
        return
    figures: dict[str, Any] = {"images": NUM_FITTED, "predicted": NUM_PREDICTED, "limit_gib": options.gib}
    for classes in options.classes:
        for structure in STRUCTURES:
            for library in ("bayesify", "laplace-torch"):
                name = f"{library}, {structure}, {classes} classes"
                figures[name] = run(library, structure, classes, options)
                print(name, figures[name], flush=True)
                record("last_layer_peers_cpu", figures, digits=4, quiet=True)


if __name__ == "__main__":
    main()
