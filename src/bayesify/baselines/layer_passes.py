"""A forward and a backward pass of a network with drawn weights. The backward pass gives gradients at the layers' outputs,
gradients of the weights, and gradients of single examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.jacobians.general import example_gradients
from bayesify.jacobians.rules import Rule, rule_for
from bayesify.jacobians.trace import Pulled, trace
from bayesify.maths.gamma import as_float
from bayesify.running.inputs_and_outputs import select_output
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Weight, owner_of

MAX_GRADIENT_BYTES = 64 * 2**20
"""Maximum number of bytes that gradients of single examples may take up at once."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs of B examples."""


class LayerPass:
    """A forward pass with one draw, and the backward pass that follows; the forward pass stores the inputs of layers.

    `rules` maps names of layers to their rules; the inputs of these layers are stored. The tensors in `weights` belong to one
    draw and have no axis of draws. Its tensors become leaves of an autograd graph that ends in `outputs`, [B, ...].
    """

    at_outputs: Tensor  # gradient of the loss at the outputs; set by `pull`
    at_layers: Pulled  # gradients of the loss at the layers; set by `pull`

    def __init__(
        self,
        runner: Runner,
        weights: Mapping[str, Tensor],
        rules: Mapping[str, Rule],
        inputs: Inputs,
        output: str | int | None,
    ) -> None:
        self.weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
        self.inputs = inputs
        self.used: set[str] = set()  # names of the weights on which the loss depends; set by `pull`
        self._trace = trace(
            runner,
            lambda own: select_output(own.call(self.weights, *inputs), output),
            {rule.module: rule for rule in rules.values()},
            lenient=True,
        )
        self.outputs = self._trace.outputs

    def pull(self, loss: Tensor, others: Sequence[Tensor], example_weights: Tensor | None) -> list[Tensor | None]:
        """Gradients of a loss with respect to the weights and other tensors. This also stores the gradients at the outputs of the
        layers and of the network.

        The loss is a weighted sum over examples, with weights [B]. A stored gradient is multiplied by the square root of its
        example's weight, so the squared gradient is multiplied by the weight itself.
        """
        taps = self._trace.taps
        targets = [self.outputs, *taps, *self.weights.values(), *others]
        grads = torch.autograd.grad(loss, targets, allow_unused=True, retain_graph=True)
        inside, outside = grads[: 1 + len(taps)], grads[1 + len(taps) :]
        if example_weights is not None:
            shrink = torch.where(example_weights > 0, example_weights.double().rsqrt(), 0.0)
            inside = tuple(grad if grad is None else grad * _along(shrink, grad) for grad in inside)
        assert inside[0] is not None
        self.at_outputs = inside[0]
        self.at_layers = self._trace.pulled([None if grad is None else grad.unsqueeze(0) for grad in inside[1:]])
        self.used = {name for name, grad in zip(self.weights, outside, strict=False) if grad is not None}
        return list(outside)

    def pull_vector(self, vector: Tensor) -> Pulled:
        """Gradients of `sum(vector * outputs)` with respect to the layers' outputs. The vector has the shape of the outputs."""
        return self._trace.pull(vector.unsqueeze(0))


def layer_rules(network: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Rule]:
    """For each layer that owns some of the weights, the rule for its gradients of single examples: a mapping from module names to
    rules.

    A tied weight has no rule, because its gradient is a sum over layers. Scale and shift of BatchNorm have no rule, because their
    normalized inputs depend on the batch.
    """
    found: dict[str, Rule] = {}
    for name, weight in weights.items():
        path, module = name.rpartition(".")[0], owner_of(network, name)[0]
        if not weight.aliases and not isinstance(module, _BatchNorm) and path not in found:
            rule = rule_for(module)
            if rule is not None:
                found[path] = rule
    return found


def general_squares(
    runner: Runner, seen: LayerPass, names: Sequence[str], output: str | int | None
) -> dict[str, Tensor]:
    """Squared gradients of the weights that have no rule, summed over examples. Examples run one by one; call `LayerPass.pull`
    first."""
    fixed = {
        alias: value.detach()
        for name, value in seen.weights.items()
        for alias in (name, *runner.weights[name].aliases)
        if name not in names
    }
    wanted = {name: seen.weights[name].detach() for name in names}
    inner = Runner(runner.network, runner.weights, {**runner.point_values, **fixed})
    found = example_gradients(inner, wanted, *seen.inputs, seen.at_outputs.unsqueeze(0), output)
    return {name: as_float(value[0]).square().sum(0) for name, value in found.items()}


def _along(numbers: Tensor, value: Tensor) -> Tensor:
    """Reshape numbers [B] so that they multiply the first axis of a tensor."""
    return numbers.to(value).view(-1, *[1] * (value.ndim - 1))
