"""How draws run through a network: one at a time, all at once by `vmap`, or in a loop; the caller never chooses."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bayesify.running.outputs import WeightDict, as_tree, count_draws, each, stack
from bayesify.weights.catalog import Weight, refresh_recurrent
from bayesify.weights.structured import StructuredWeight

Mode = Literal["single", "vmap", "loop"]


_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_NO_BATCHING_RULE = (nn.RNNCellBase, nn.EmbeddingBag, nn.MultiheadAttention)
SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"


class Runner:
    """A network with empty slots, and the ways to run draws through it.

    Args:
        network: The network, its slots under the posterior empty.
        weights: The weights that were taken out of it.
        point_values: Values to use in place of the network's own parameters and buffers, by name; a prediction that is
            evaluated later takes a snapshot here.
    """

    def __init__(
        self, network: nn.Module, weights: Mapping[str, Weight], point_values: WeightDict | None = None
    ) -> None:
        self.network = network
        self.weights = weights
        self.point_values = point_values or {}
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())

    def snapshot(self) -> Runner:
        """The same network with its point estimates and buffers frozen at their present values."""
        named: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        named.update(self.network.named_buffers(remove_duplicate=False))
        return Runner(self.network, self.weights, {name: value.detach().clone() for name, value in named.items()})

    def call(self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One forward pass with one draw: `values` by first name, without an axis of draws."""
        named = dict(self.point_values)
        for name, value in values.items():
            named[name] = value
            if name in self.weights:
                for alias in self.weights[name].aliases:
                    named[alias] = value
        if not self._recurrent:
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        named = {
            name: value.materialize() if isinstance(value, StructuredWeight) else value for name, value in named.items()
        }
        self._load_recurrent(named)
        try:
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        finally:
            refresh_recurrent(self.network)

    def _load_recurrent(self, named: WeightDict) -> None:
        for path, module in self.network.named_modules():
            if isinstance(module, nn.RNNBase):
                prefix = f"{path}." if path else ""
                module._flat_weights = [
                    named.get(prefix + leaf, module._parameters.get(leaf)) for leaf in module._flat_weights_names
                ]

    def mode(self, num_draws: int) -> Mode:
        """How `num_draws` draws should run.

        One draw needs no `vmap`. Recurrent modules and cells, attention, `EmbeddingBag`, and BatchNorm in training mode
        have no batching rule, or one that loops inside with a warning. A convolution
        whose kernel differs between draws becomes a grouped convolution, which is slower than a loop on CPU and GPU.
        Everything else gains from `vmap`; where it is refused, the loop takes over.
        """
        if num_draws == 1:
            return "single"
        if self._recurrent or self.network in _REFUSED:
            return "loop"
        if any(isinstance(module, _NO_BATCHING_RULE) for module in self.network.modules()):
            return "loop"
        if any(weight.kind == "matrix" and len(weight.shape) > 2 for weight in self.weights.values()):
            return "loop"
        for module in self.network.modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                return "loop"
        return "vmap"

    def run(
        self,
        values: WeightDict,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        mode: Mode | None = None,
        chunk_size: int | None = None,
        buffers: Sequence[WeightDict] | None = None,
    ) -> Any:
        """Run all draws over the same inputs.

        Args:
            values: Weights by first name, each with a leading axis of S draws.
            args: Positional inputs of the network.
            kwargs: Keyword inputs of the network.
            mode: Forces the way to run; chosen automatically if left out.
            chunk_size: Draws that `vmap` holds at once.
            buffers: Per-draw buffers, one dict per draw; a loop lets the network update them in place.

        Returns:
            The network's output with a leading axis of S in every tensor.
        """
        num_draws = count_draws(values)
        mode = mode or self.mode(num_draws)
        if any(isinstance(value, StructuredWeight) and not value.batchable for value in values.values()):
            mode = "single" if num_draws == 1 else "loop"
        if mode == "vmap":
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=SLOW_VMAP)
                    together = (
                        {name: torch.stack([part[name] for part in buffers]) for name in buffers[0]} if buffers else {}
                    )
                    return self._vmap({**values, **together}, args, kwargs, chunk_size)
            except UserWarning as slow:
                if not str(slow).startswith(SLOW_VMAP):
                    raise
                _REFUSED.add(self.network)  # right, but slower than the loop, and torch says so each time
                return self._loop(values, args, kwargs, buffers)
            except (RuntimeError, ValueError) as refusal:
                outputs = self._loop(
                    values, args, kwargs, buffers
                )  # a mistake of the caller's fails here too, in plain words
                refuse_vmap(self.network, refusal)
                return outputs
        return self._loop(values, args, kwargs, buffers)

    def _vmap(
        self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunk_size: int | None
    ) -> Any:
        rebuild: list[Callable[[Any], Any]] = []

        def one(weights: dict[str, Tensor]) -> Any:
            tree, build = as_tree(self.call(weights, args, kwargs))
            rebuild.append(build)
            return tree

        outputs = torch.func.vmap(one, chunk_size=chunk_size, randomness="different")(dict(values))
        return rebuild[0](outputs)

    def _loop(
        self,
        values: WeightDict,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        buffers: Sequence[WeightDict] | None,
    ) -> Any:
        trees = []
        for index, draw in enumerate(each(values)):
            tree, build = as_tree(self.call({**draw, **buffers[index]} if buffers else draw, args, kwargs))
            trees.append(tree)
        if len(trees) == 1:
            return build(pytree.tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), trees[0]))
        return build(pytree.tree_map(stack, *trees))


def refuse_vmap(network: nn.Module, refusal: Exception) -> None:
    """Remember that `vmap` cannot run a network, and say so, except where it is only slower."""
    _REFUSED.add(network)
    reason = str(refusal).strip().splitlines()[0]
    if not reason.startswith(SLOW_VMAP):
        warnings.warn(f"{type(network).__name__}: vmap refused ({reason}); draws run in a loop instead", stacklevel=4)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while; each submodule gets its own mode back."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode
