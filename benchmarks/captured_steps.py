"""Training by `fit` on a GPU compared with a plain network in an eager loop, including loaders and host copies.

python -m benchmarks.captured_steps
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, models, posteriors
from benchmarks.timing import record

BATCH_SIZE = 128


def plain_loop(net: nn.Module, loader, epochs: int, bf16: bool) -> float:
    """Seconds per step of the last epochs."""
    net = net.cuda().train()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    seconds = []
    for _ in range(epochs):
        torch.cuda.synchronize()
        start, steps = time.perf_counter(), 0
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss = nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
            steps += 1
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / steps)
    return min(seconds[1:])


class OnDevice:
    """The same data, already on the GPU, to measure the plain loop without its loader."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x.cuda(), y.cuda()

    def __iter__(self):
        for rows in torch.randperm(len(self.x), device="cuda").split(BATCH_SIZE):
            yield self.x[rows], self.y[rows]


def through_fit(net: nn.Module, posterior, loader, epochs: int, bf16: bool) -> tuple[float, str]:
    bnn = bayesify.bayesianize(net.cuda(), posterior, likelihood=likelihoods.Categorical())
    precision = "bf16" if bf16 else "float32"
    history = bayesify.fit(bnn, loader, epochs=epochs, seed=0, precision=precision, progress=False)
    batches = len(loader)
    return min(row["seconds"] for row in history[1:]) / batches, history.notes["capture"]


def measure(name: str, make, shape, rows: int, bf16: bool, families) -> dict:
    x, y = torch.randn(rows, *shape), torch.randint(0, 10, (rows,))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    eager, resident = plain_loop(make(), loader, 3, bf16), plain_loop(make(), OnDevice(x, y), 3, bf16)
    found = {"plain_ms": 1e3 * eager, "plain_on_device_ms": 1e3 * resident}
    for key, posterior in families.items():
        seconds, note = through_fit(make(), posterior(), loader, 4, bf16)
        found |= {
            f"{key}_ms": 1e3 * seconds,
            f"{key}_over_plain": seconds / eager,
            f"{key}_over_plain_on_device": seconds / resident,
            f"{key}_capture": note,
        }
    print(name, found, flush=True)
    return found


def main() -> None:
    families = {"mean_field": posteriors.MeanField, "inducing": lambda: posteriors.InducingWeights(64, 64)}
    found = {
        "mlp_784_512_512_10": measure("mlp", lambda: models.mlp([784, 512, 512, 10]), (784,), 25_600, False, families)
    }

    def resnet() -> nn.Module:
        return models.resnet18(variant="cifar").to(memory_format=torch.channels_last)

    found["resnet18_bf16"] = measure("resnet18", resnet, (3, 32, 32), 5_120, True, families)
    record("captured_steps", found, batch=BATCH_SIZE, baseline="plain network, Adam, eager loop")


if __name__ == "__main__":
    main()
