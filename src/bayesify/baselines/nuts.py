"""Reference posterior of a small network, from Pyro's No-U-Turn sampler (Hoffman & Gelman 2014) over the weights."""

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, Seed, checked
from bayesify.arguments.installing import how_to_install
from bayesify.draws import Draws
from bayesify.likelihoods.objectives import check_example_weights, exact_copy, expected_log_likelihood
from bayesify.network import BayesianNetwork
from bayesify.running.generators import own_generators
from bayesify.running.inputs_and_outputs import checked_inputs, select_output
from bayesify.running.runner import Runner


@checked
def nuts(
    bnn: BayesianNetwork,
    x: Any,
    y: Tensor,
    *,
    example_weights: Tensor | None = None,
    num_draws: Count = 500,
    num_warmup: Count = 500,
    thin: Count = 1,
    max_tree_depth: Count = 8,
    seed: Seed = 0,
) -> Draws:
    r"""Draw from the exact posterior $p(w | y) \propto p(w) \prod_n p(y_n | f_w(x_n))^{\omega_n}$ with one Markov chain.

    Prior, likelihood and network come from `bnn`. The chain starts at the mean of `bnn`'s variational posterior, which is not used
    for anything else. Parameters of the likelihood, such as its noise, keep their current values, and so do weights that have no
    posterior. A step of the chain costs up to `2 ** max_tree_depth` gradients over all data, so the sampler suits networks with at
    most a few hundred weights. The sampler uses float64, regardless of the network's dtype.

    Args:
        bnn: A network with a likelihood and a fixed prior.
        x: Inputs of all N examples, in any form that `bnn.predict` accepts.
        y: Targets of the examples.
        example_weights: Number of examples $\omega$ that each row represents, [N]; 1 by default.
        num_draws: Number of draws S to keep.
        num_warmup: Number of warm-up steps, in which step size and mass matrix adapt.
        thin: Number of steps per kept draw.
        max_tree_depth: Largest number of doublings of a trajectory.
        seed: Seed of the chain.

    Returns:
        The draws. Their `kl` is NaN, because it is unknown.

    Raises:
        ImportError: If pyro-ppl is missing.
        TypeError: If `bnn` is not a `BayesianNetwork`.
        ValueError: If a count is below 1, if data are not finite, if example weights are invalid, or if the prior is hierarchical.
    """
    try:
        infer: Any = import_module("pyro.infer")
    except ImportError as error:
        raise ImportError(f"nuts: pyro-ppl is not installed; {how_to_install('reference')}") from error
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("nuts: some targets are not finite; remove the rows with these targets")
    start = {name: mean.detach() for posterior in bnn.posteriors for name, mean in posterior.mean().items()}
    if example_weights is not None:
        check_example_weights(example_weights, len(y))
    potential = _Potential(bnn, x, start, y, example_weights)
    flat = torch.cat([value.reshape(-1) for value in start.values()]).double()
    with own_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide deprecation warnings of Pyro's dependencies
        torch.manual_seed(seed)
        kernel = infer.NUTS(potential_fn=potential, max_tree_depth=max_tree_depth)
        counts = {"num_samples": num_draws * thin, "warmup_steps": num_warmup}
        chain = infer.MCMC(kernel, **counts, initial_params={"weights": flat}, disable_progbar=True)
        chain.run()
    drawn = chain.get_samples()["weights"][::thin]
    reference = next(iter(start.values()))
    weights = {name: value.to(reference) for name, value in potential.split(drawn).items()}
    return Draws(potential.runner.snapshot(), weights, reference.new_full((num_draws,), float("nan")))


class _Potential:
    """The potential -log p(w, y) as a function of one vector that holds all weights, in float64."""

    def __init__(self, bnn: BayesianNetwork, x: Any, start: dict[str, Tensor], *targets: Any) -> None:
        self.likelihood = exact_copy(bnn.require_likelihood("nuts"))
        self.prior = bnn.prior.draw(1).require_fixed("nuts")
        self.runner, self.inputs, self.output = Runner(bnn.network, bnn.weights), checked_inputs(x), bnn.output
        self.shapes = {name: tuple(value.shape) for name, value in start.items()}
        self.sizes = {name: value.numel() for name, value in start.items()}
        self.dtype, (self.y, self.example_weights) = next(iter(start.values())).dtype, targets

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split vectors [..., P] into a mapping from names to weights [..., *shape]."""
        parts = flat.split(list(self.sizes.values()), dim=-1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def __call__(self, parameters: dict[str, Tensor]) -> Tensor:
        weights = self.split(parameters["weights"])
        cast = {name: value.to(self.dtype) for name, value in weights.items()}
        outputs = select_output(self.runner.call(cast, *self.inputs), self.output).unsqueeze(0)
        given = self.y, self.likelihood, len(self.y), self.example_weights
        data = expected_log_likelihood(outputs, *given)[0]
        penalty = self.prior.cross_entropy({name: value.square().sum() for name, value in weights.items()}, self.sizes)
        return penalty - data
