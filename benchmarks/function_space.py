"""Cost of a step of function-space inference compared with a mean-field step: 10 context inputs, diagonal form, batch 128.

The networks are the MLP 784-256-256-10 and a three-layer convolutional network on a CPU, and ResNet-18 on a GPU.
"""

import torch
from bayesify_papers.function_space.networks import convolutional_network
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors

from .runs import parser
from .timing import adam_step, elbo_step, ratios, record

BATCH, POINTS, NUM_DATA = 128, 10, 60_000


def step_ratios(
    net: nn.Module, shape: tuple[int, ...], seconds: float, device: str, layers: tuple[str, ...]
) -> list[float]:
    """Time of a step for each choice of layers, as a ratio to a mean-field step of the same network."""
    x = torch.rand(BATCH, *shape, device=device)
    y = torch.randint(0, 10, (BATCH,), device=device)

    def make() -> bayesify.BayesianNetwork:
        posterior = posteriors.MeanField(init_std=1e-2)
        return bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).to(device).eval()

    steps = []
    for choice in layers:
        bnn = make()
        space = bayesify.FunctionSpaceVI(bnn, context=bayesify.Box(0.0, 1.0, POINTS), layers=choice)  # type: ignore[arg-type]
        steps.append(adam_step(bnn, lambda space=space: -space.objective(x, y, num_data=NUM_DATA) / NUM_DATA))
    return ratios(elbo_step(make(), x, y, NUM_DATA), *steps, seconds=seconds)


def peak_memory(net: nn.Module, shape: tuple[int, ...], memory: int) -> float:
    """Peak memory in GiB that one KL and its gradient add on the GPU, under a memory budget."""
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=1e-2)).cuda().eval()
    space = bayesify.FunctionSpaceVI(bnn, context=bayesify.Box(0.0, 1.0, POINTS), memory=memory)
    x = torch.rand(POINTS, *shape, device="cuda")
    space.function_kl(x).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    space.function_kl(x).backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    seconds = parser(__doc__, seconds=10.0).parse_args().seconds
    torch.manual_seed(0)
    unit = "time of an Adam step divided by the time of a mean-field step of the same network in the same run"
    both = ("all", "last")
    if torch.cuda.is_available():
        net = models.resnet18()
        every, last = step_ratios(net, (3, 32, 32), seconds, "cuda", both)
        figures = {"resnet18_step": every, "resnet18_step_last_layer": last}
        figures["resnet18_kl_gib_of_2"] = peak_memory(net, (3, 32, 32), 2 * 2**30)
        record("function_space_gpu", figures, digits=3, unit=unit)
        return
    mlp = step_ratios(models.mlp([784, 256, 256, 10]), (784,), seconds, "cpu", both)
    conv = step_ratios(convolutional_network(1, 28), (1, 28, 28), 2 * seconds, "cpu", both)
    figures = {"mlp_step": mlp[0], "mlp_step_last_layer": mlp[1], "conv_step": conv[0], "conv_step_last_layer": conv[1]}
    record("function_space_cpu", figures, digits=3, unit=unit)


if __name__ == "__main__":
    main()
