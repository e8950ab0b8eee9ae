"""How draws run through a network: one at a time, all at once by `vmap` or as rows of a batch, or in a loop."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bayesify.running.free_copies import FreeCopies
from bayesify.running.inputs import Untouched
from bayesify.running.kernels import without_cudnn
from bayesify.running.light_copies import LightCopy, Places
from bayesify.running.memory import batch_size
from bayesify.running.outputs import WeightDict, as_tree, count_draws, each, stack
from bayesify.running.row_draws import NotByRows, as_rows, can_take_rows, split_draws
from bayesify.weights.catalog import Weight, owner_of, refresh_recurrent
from bayesify.weights.placed import PlacedWeights
from bayesify.weights.structured import LocalWeight, StructuredWeight

Mode = Literal["single", "vmap", "rows", "loop"]
Result = TypeVar("Result")

_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_FACTS: weakref.WeakKeyDictionary[nn.Module, _Facts] = weakref.WeakKeyDictionary()
_NO_BATCHING_RULE = (nn.RNNCellBase, nn.EmbeddingBag, nn.MultiheadAttention)
_PLAIN = {Tensor}
_SHARED = threading.RLock()
"""Held while a network that cannot be copied (compiled code runs one module object) has a draw in its slots."""
HEAVY = 2**37
"""Operations of a pass that keep a GPU busy for longer than the host takes to launch it: there `vmap` saves nothing, and a loop is
faster (H200, GPT-2 in bfloat16, 8 x 512 tokens: five draws that exist take 1.14 passes each; a loop 1.09, fresh draws included)."""
SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"


class _Facts(NamedTuple):
    """What follows from the weights that were taken out of a network: paths of their modules, and names of tied ones."""

    weights: Mapping[str, Weight]
    owners: set[str]
    aliases: dict[str, tuple[str, ...]]


class Runner:
    """A network with empty slots, and the ways to run draws through it.

    A pass runs a light copy of the network (see `LightCopy`), so that several threads can use one network: slots, modes and
    hooks of a pass are its own. What a network's own code assigns to its attributes and buffers is given back to it after the
    pass, except in evaluation mode by `evaluating` and under `vmap`.

    Args:
        network: The network, its slots under the posterior empty.
        weights: The weights that were taken out of it.
        point_values: Values to use in place of the network's own parameters and buffers, by name; a prediction that is
            evaluated later takes a snapshot here.
        evaluate: Whether passes are in evaluation mode whatever the network's own mode is.
        copies: Copies of the network with empty slots for these weights that no pass has; none by default.
    """

    def __init__(
        self,
        network: nn.Module,
        weights: Mapping[str, Weight],
        point_values: WeightDict | None = None,
        *,
        evaluate: bool = False,
        copies: FreeCopies | None = None,
    ) -> None:
        self.network = network
        self.weights = weights
        self.point_values = point_values or {}
        self.evaluate = evaluate
        self._copies = copies or FreeCopies()
        self._copy: LightCopy | None = None
        self._is_alone = False
        self._origin = network
        self.places: Places = ([], [])
        self._keeps_state = True
        self._listed: list[nn.Module] = []
        self._recurrent: bool | None = None

    def evaluating(self) -> Runner:
        """The same network, in evaluation mode."""
        return self._like(self.point_values, True)

    def _like(self, point_values: WeightDict, evaluate: bool) -> Runner:
        return Runner(self.network, self.weights, point_values, evaluate=evaluate, copies=self._copies)

    def snapshot(self) -> Runner:
        """The same network with its point estimates and buffers frozen at their present values."""
        named: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        named.update(self.network.named_buffers(remove_duplicate=False))
        frozen = {name: value.detach().clone() for name, value in named.items()}
        return self._like(frozen, self.evaluate)

    @contextmanager
    def alone(self, *, hooks: bool = True, share: bool = False) -> Iterator[Runner]:
        """The same over a light copy of the network that nobody else sees, for several passes, or for hooks.

        Args:
            hooks: Whether hooks can be registered with the copy's modules.
            share: Whether only slots of the weights are filled, so that other leaf modules need no copy.
        """
        if self._is_alone:
            yield self
            return
        own = self._like(self.point_values, self.evaluate)
        own._is_alone, own._origin = True, self._origin
        if torch.compiler.is_compiling():
            with _modes(list(self.network.modules()), self.evaluate):
                yield own
            return
        owners = self._facts().owners if share and not self.point_values else None
        if hooks:
            copied = LightCopy(self.network, evaluate=self.evaluate, owners=owners)
        else:
            copied = self._copies.take(self.network, self.evaluate, owners)
        if not copied.complete:
            with _SHARED, _modes(list(self.network.modules()), self.evaluate):
                yield own
            return
        own._copy, own.network = copied, copied.root
        yield own
        if not hooks:
            own._copy, own._is_alone, own.network, own._listed = None, False, self.network, []
            self._copies.put(copied, self.evaluate, owners)

    def _facts(self) -> _Facts:
        """See `_Facts`; looked up once for a network."""
        compiling = torch.compiler.is_compiling()
        known = None if compiling else _FACTS.get(self._origin)
        if known is None or known.weights is not self.weights:
            aliases = {name: tuple(weight.aliases) for name, weight in self.weights.items() if weight.aliases}
            names = [name for weight in self.weights.values() for name in (weight.name, *weight.aliases)]
            known = _Facts(self.weights, {name.rpartition(".")[0] for name in names}, aliases)
            if not compiling:
                _FACTS[self._origin] = known
        return known

    def _give_back(self) -> None:
        """Give the network what its own code has assigned to it in a pass."""
        if self._copy is not None and self._keeps_state and not self.evaluate:
            self._copy.write_back()

    def module(self, original: nn.Module) -> nn.Module:
        """The module that stands for one of the network's own in a runner that is `alone`."""
        return original if self._copy is None else self._copy[original]

    def call(
        self,
        values: WeightDict,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        protect: bool = True,
        method: str = "__call__",
    ) -> Any:
        """One forward pass with one draw.

        Args:
            values: Weights and buffers by first name, without an axis of draws.
            args: Positional inputs of the network.
            kwargs: Keyword inputs of the network.
            protect: Whether the network gets copies of the inputs, which it may change in place.
            method: Of the network, such as `"generate"`; the forward pass by default.
        """
        if protect:
            args, kwargs = Untouched(args, kwargs).take()
        named = {**self.point_values, **values}
        if set(map(type, values.values())) != _PLAIN:
            for value in values.values():
                if isinstance(value, LocalWeight):
                    value.begin_pass(batch_size(args, kwargs))
        for name, aliases in self._facts().aliases.items():
            if name in values:
                named |= dict.fromkeys(aliases, values[name])
        if torch.compiler.is_compiling():
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        if self._is_alone:
            return self._run_with(named, args, kwargs, method)
        with self.alone(hooks=False, share=values.keys() <= self.weights.keys()) as own:
            output = own._run_with(named, args, kwargs, method)
            own._give_back()
        return output

    def _run_with(self, named: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str) -> Any:
        recurrent = self._is_recurrent()
        places = self._places_of(list(named))
        before = [slots[leaf] for slots, leaf in places]
        for (slots, leaf), value in zip(places, named.values(), strict=True):
            slots[leaf] = _for_recurrent(value) if recurrent else value
        if recurrent:
            refresh_recurrent(self.network)
        try:
            with without_cudnn() if recurrent and self._needs_plain_recurrence(named) else nullcontext():
                return getattr(self.network, method)(*args, **kwargs)
        finally:
            for (slots, leaf), value in zip(places, before, strict=True):
                slots[leaf] = value
            if recurrent:
                refresh_recurrent(self.network)

    def _places_of(self, names: list[str]) -> list[tuple[dict[str, Any], str]]:
        """The slots of parameters and buffers, looked for once where the same are filled in pass after pass."""
        holder = self if self._copy is None else self._copy
        if holder.places[0] != names:
            holder.places = names, [self._slot(name) for name in names]
        return holder.places[1]

    def _slot(self, name: str) -> tuple[dict[str, Any], str]:
        """Where a parameter or buffer lies, and its name there."""
        path, _, leaf = name.rpartition(".")
        owner = self._copy.owned.get(path) if self._copy is not None else None
        if owner is None:
            owner = owner_of(self.network, name)[0]
        return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf

    def _modules(self) -> list[nn.Module]:
        """All modules, listed once where nobody else can change them."""
        if not self._is_alone:
            return list(self.network.modules())
        if not self._listed:
            self._listed = list(self.network.modules()) if self._copy is None else self._copy.modules()
        return self._listed

    def _is_recurrent(self) -> bool:
        if self._recurrent is None or not self._is_alone:
            kinds = set(map(type, self._modules())) if self._copy is None else self._copy.kinds
            self._recurrent = any(issubclass(kind, nn.RNNBase) for kind in kinds)
        return self._recurrent

    def _needs_plain_recurrence(self, named: Mapping[str, Tensor]) -> bool:
        """Whether a recurrent layer in evaluation mode may be differentiated, which the kernels of cuDNN refuse."""
        if not torch.is_grad_enabled() or not any(value.is_cuda for value in named.values()):
            return False
        return any(isinstance(module, nn.RNNBase) and not module.training for module in self._modules())

    def mode(self, num_draws: int) -> Mode:
        """How `num_draws` draws should run.

        One draw needs no `vmap`. Recurrent modules and cells, attention, `EmbeddingBag`, and BatchNorm in training mode
        have no batching rule, or one that loops inside with a warning; a transformer that returns a cache of keys and values
        returns an object that `vmap` cannot: its draws are rows of one batch where they are weights of linear layers. A convolution
        whose kernel differs between draws becomes a grouped convolution, which is slower than a loop on CPU and GPU.
        Everything else gains from `vmap`, except passes of much work on a GPU (see `HEAVY`); where it is refused, the loop takes
        over.
        """
        if num_draws == 1:
            return "single"
        if self._is_recurrent() or self._origin in _REFUSED:
            return "loop"
        if any(weight.kind == "matrix" and len(weight.shape) > 2 for weight in self.weights.values()):
            return "loop"
        modules = self._modules()
        for kind in set(map(type, modules)):
            if issubclass(kind, _NO_BATCHING_RULE):
                return "loop"
            if issubclass(kind, _BatchNorm):
                norms = [module for module in modules if type(module) is kind]
                if any((norm.training and not self.evaluate) or norm.running_mean is None for norm in norms):
                    return "loop"
        if any(_keeps_cache(module) for module in modules):
            return "rows" if can_take_rows(self.network, self.weights) else "loop"
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
            mode: Forces the way to run; chosen automatically by default.
            chunk_size: Draws that `vmap` holds at once.
            buffers: Per-draw buffers, one dict per draw; a loop lets the network update them in place.

        Returns:
            The network's output with a leading axis of S in every tensor.
        """
        if not self._is_alone:
            with self.alone(hooks=False, share=buffers is None) as own:
                outputs = own.run(values, args, kwargs, mode=mode, chunk_size=chunk_size, buffers=buffers)
                own._give_back()
            return outputs
        num_draws = count_draws(values)
        mode = mode or self.mode(num_draws)
        if mode == "vmap" and next(iter(values.values())).is_cuda and self._work(args, kwargs) >= HEAVY:
            mode = "loop"
        given = () if isinstance(values, PlacedWeights) else values.values()
        structured = [value for value in given if isinstance(value, StructuredWeight)]
        if not all(value.batchable for value in structured):
            mode = "loop"
        if mode == "rows" and not buffers and not structured:
            try:
                return self._rows(values, args, kwargs)
            except NotByRows:
                _REFUSED.add(self._origin)
        if mode != "vmap":
            return self._loop(values, args, kwargs, buffers)
        together = {name: torch.stack([part[name] for part in buffers]) for name in buffers[0]} if buffers else {}
        try:
            return quick_vmap(
                lambda: self._vmap({**values, **together}, args, kwargs, chunk_size), self._origin, "draws"
            )
        except (RuntimeError, ValueError, SlowVmap) as refusal:
            outputs = self._loop(values, args, kwargs, buffers)  # a mistake of the caller's fails here, in plain words
            self.refuse_vmap(refusal)
            return outputs

    def _work(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """About the operations of a pass: two for each weight and each row of numbers, or each token, of the largest input."""
        inputs = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim]
        rows = [leaf.numel() // max(leaf.shape[-1], 1) if leaf.is_floating_point() else leaf.numel() for leaf in inputs]
        return 2 * max(rows, default=0) * sum(weight.numel for weight in self.weights.values())

    def _vmap(
        self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunk_size: int | None
    ) -> Any:
        rebuild: list[Callable[[Any], Any]] = []
        inputs = Untouched(args, kwargs)
        self._keeps_state = False  # what a network assigns to itself here is dead after the pass

        def one(weights: dict[str, Tensor]) -> Any:
            tree, build = as_tree(self.call(weights, *inputs.take(), protect=False))
            rebuild.append(build)
            return tree

        outputs = torch.func.vmap(one, chunk_size=chunk_size, randomness="different")(dict(values))
        return rebuild[0](outputs)

    def _rows(self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        num_draws, rows = count_draws(values), count_draws(values) * batch_size(args, kwargs)
        tree, build = as_tree(self.call(*as_rows(values, args, kwargs), protect=False))
        return build(split_draws(tree, num_draws, rows))

    def _loop(
        self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any], buffers: Sequence[WeightDict] | None
    ) -> Any:
        trees = []
        single = count_draws(values) == 1 and not self.evaluate  # that is the network itself: it may change its inputs
        inputs = None if single else Untouched(args, kwargs)
        for index, draw in enumerate(each(values)):
            given = inputs.take() if inputs is not None else (args, kwargs)
            named = {**draw, **buffers[index]} if buffers else draw
            tree, build = as_tree(self.call(named, *given, protect=False))
            trees.append(tree)
        if set(map(type, trees)) == _PLAIN:
            return build(torch.stack(trees) if len(trees) > 1 else trees[0].unsqueeze(0))
        if len(trees) == 1:
            return build(pytree.tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), trees[0]))
        return build(pytree.tree_map(stack, *trees))

    def refuse_vmap(self, refusal: Exception) -> None:
        """Keep that `vmap` cannot run the network, and say so, except where it is only slower."""
        _REFUSED.add(self._origin)
        if not isinstance(refusal, SlowVmap):
            reason = str(refusal).strip().splitlines()[0]
            name = type(self.network).__name__
            warnings.warn(f"{name}: vmap refused ({reason}); draws run in a loop instead", stacklevel=4)


class _Kept:
    """A runner, in an attribute of its owner: a network may refer to who owns it. A copy or a pickle of this object has none."""

    __slots__ = ("runner",)

    def __init__(self) -> None:
        self.runner: Runner | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()


def runner_of(owner: nn.Module, network: nn.Module, weights: Mapping[str, Weight]) -> Runner:
    """A runner of a network that somebody owns, the same for all draws, so that copies serve pass after pass."""
    if torch.compiler.is_compiling():
        return Runner(network, weights)
    kept = vars(owner).setdefault("_kept_runner", _Kept())
    known: Runner | None = kept.runner
    if known is None or known.network is not network or known.weights is not weights:
        known = kept.runner = Runner(network, weights)
    return known


def _keeps_cache(module: nn.Module) -> bool:
    """Whether a module's configuration says that it returns a cache of keys and values, as Hugging Face's models do."""
    return getattr(module.__dict__.get("config"), "use_cache", False) is True


class SlowVmap(Exception):
    """`vmap` runs, but loops inside over an operation without a batching rule."""


_QUICK: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
FILTERS = threading.RLock()
"""Held while warnings are turned into errors or off, which is for all threads."""


def _for_recurrent(value: Tensor) -> Tensor:
    """A weight as kernels of recurrent layers take it: a plain tensor without gaps."""
    return (value.materialize() if isinstance(value, StructuredWeight) else value).contiguous()


def quick_vmap(run: Callable[[], Result], network: nn.Module, what: str) -> Result:
    """Run something by `vmap`; the first time for a network, raise `SlowVmap` where torch warns of a loop inside."""
    if what in _QUICK.get(network, ()) or torch.compiler.is_compiling():
        return run()
    with FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("error", message=SLOW_VMAP)
        try:
            found = run()
        except UserWarning as slow:
            if not str(slow).startswith(SLOW_VMAP):
                raise
            raise SlowVmap(str(slow)) from slow
    _QUICK.setdefault(network, set()).add(what)
    return found


@contextmanager
def _modes(modules: Sequence[nn.Module], evaluate: bool) -> Iterator[None]:
    """Evaluation mode for a while if asked for; each module gets its own mode back."""
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = module.training and not evaluate
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode
