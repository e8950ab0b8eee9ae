"""One pass of a network with drawn weights, and the gradients that come back: at layers, by weights, example by example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.jacobians.general import example_gradients
from bayesify.jacobians.rules import Rule, rule_for
from bayesify.maths.gamma import as_float
from bayesify.running.outputs import select_output
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Weight, owner_of

EXAMPLES_BYTES = 64 * 2**20
"""Bytes of gradients of single examples that are held at a time."""


class LayerPass:
    """A forward pass with one draw, the inputs of its layers kept, and the gradients that come back.

    Args:
        runner: The network.
        weights: One draw by name, without an axis of draws; they are detached.
        rules: The layers whose inputs to keep, with their rules, by module name.
        args: Positional inputs of B examples.
        kwargs: Keyword inputs.
        output: Which of several outputs.

    Attributes:
        outputs: The network's outputs, [B, ...], in the graph.
        weights: The draw, as leaves of the graph.
        inputs: Positional and keyword inputs.
        at_outputs, at_taps: Gradients of the loss, after `pull`: at the outputs, and at `taps()`.
        used: Names of the weights that the loss depends on, after `pull`.
    """

    at_outputs: Tensor
    at_taps: Sequence[Tensor | None]

    def __init__(
        self,
        runner: Runner,
        weights: Mapping[str, Tensor],
        rules: Mapping[str, Rule],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: str | int | None,
    ) -> None:
        self.weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
        self.inputs = args, kwargs
        self.used: set[str] = set()
        self._rules = rules
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in rules}
        names: dict[nn.Module, str] = {}

        def watch(module: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
            try:
                kept = self._rules[names[module]].keep(inputs[0].detach())
            except ValueError:  # a layer of a kind that has a rule, in a form that has none
                return result
            self._calls[names[module]].append((kept, result))
            return result.clone()  # an operation in place on the layer's output must not reach what is kept

        with runner.alone() as own, ExitStack() as stack, torch.enable_grad():
            names.update({own.network.get_submodule(path): path for path in rules})
            for module in names:
                stack.callback(module.register_forward_hook(watch).remove)
            self.outputs = select_output(own.call(self.weights, args, kwargs), output)

    def taps(self) -> list[Tensor]:
        """Outputs of these layers, call by call."""
        return [result for calls in self._calls.values() for _, result in calls]

    def pull(self, loss: Tensor, others: Sequence[Tensor], example_weights: Tensor | None) -> list[Tensor | None]:
        """Gradients of a loss by the weights and by other tensors; those inside of the network are kept.

        Args:
            loss: Of the outputs, a sum over examples times their weights.
            others: Further tensors.
            example_weights: [B]. A kept gradient holds the root of its example's weight, so that its square holds the weight.
        """
        taps = self.taps()
        targets = [self.outputs, *taps, *self.weights.values(), *others]
        grads = torch.autograd.grad(loss, targets, allow_unused=True, retain_graph=True)
        inside, outside = grads[: 1 + len(taps)], grads[1 + len(taps) :]
        if example_weights is not None:
            shrink = torch.where(example_weights > 0, example_weights.double().rsqrt(), 0.0)
            inside = tuple(grad if grad is None else grad * _along(shrink, grad) for grad in inside)
        assert inside[0] is not None
        self.at_outputs, self.at_taps = inside[0], inside[1:]
        self.used = {name for name, grad in zip(self.weights, outside, strict=False) if grad is not None}
        return list(outside)

    def by_layer(self, grads: Sequence[Tensor | None]) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """What each layer kept, [B, ...], with the gradient at its output, [B, ...], call by call, from gradients at `taps()`."""
        given = iter(grads)
        return {
            path: [(kept, grad) for kept, _ in calls if (grad := next(given)) is not None]
            for path, calls in self._calls.items()
        }


def layer_rules(network: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Rule]:
    """Rules for the gradients of single examples, by module name, of the layers that own some of the weights.

    A tied weight has none, since its gradient is a sum over layers, and neither has scale and shift of BatchNorm, whose
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


def squared_gradients(rule: Rule, leaf: str, calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum over examples of the squared gradient of one weight of a layer: its shape.

    A linear layer that sees each example once needs one product of squares; anything else materializes the gradients of as many
    examples at a time as fit into `EXAMPLES_BYTES`.
    """
    if len(calls) == 1 and isinstance(rule.module, nn.Linear) and calls[0][1].ndim == 2:
        kept, grad = calls[0][0].squeeze(1), as_float(calls[0][1]).square()
        return grad.sum(0) if leaf == "bias" else grad.T @ kept.square()
    examples = calls[0][1].shape[0]
    parameter_size = max(1, rule.dense(leaf, calls[0][0][:1], calls[0][1][None, :1]).numel())
    rows = max(1, EXAMPLES_BYTES // (4 * parameter_size))
    total: Any = 0.0
    for start in range(0, examples, rows):
        part = slice(start, start + rows)
        each = sum(rule.dense(leaf, kept[part], grad[None, part])[0] for kept, grad in calls)
        total = total + torch.as_tensor(each).square().sum(0)
    return torch.as_tensor(total)


def general_squares(
    runner: Runner, seen: LayerPass, names: Sequence[str], output: str | int | None
) -> dict[str, Tensor]:
    """The same for weights of layers without a rule, by running one example at a time, after `LayerPass.pull`."""
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
    """[B] in a shape that multiplies the first axis of a tensor."""
    return numbers.to(value).view(-1, *[1] * (value.ndim - 1))
