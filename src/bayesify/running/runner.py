"""Ways to run draws through a network: one at a time in a loop, all at once with `vmap`, or as rows of one batch."""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bayesify.maths.value_checks import transforming
from bayesify.running.generators import backup, owned_generators
from bayesify.running.inputs_and_outputs import (
    Args,
    Kwargs,
    Untouched,
    WeightDict,
    as_tree,
    batch_size,
    count_draws,
    each,
    parts_of,
    stack,
)
from bayesify.running.light_copies import FreeCopies, LightCopy, Places, attributes_of_objects
from bayesify.running.modes import modes_kept, without_cudnn
from bayesify.running.row_draws import NotByRows, as_rows, can_take_rows, split_draws
from bayesify.weights.catalog import Weight, owner_of, refresh_recurrent
from bayesify.weights.layout import PlacedWeights
from bayesify.weights.structured import LocalWeight, StructuredWeight

Mode = Literal["single", "vmap", "rows", "loop"]
Buffers = Sequence[WeightDict] | None
Result = TypeVar("Result")

NO_BATCHING_RULE = (nn.RNNBase, nn.RNNCellBase, nn.EmbeddingBag, nn.MultiheadAttention)
"""Modules that `vmap` cannot run, or runs as a loop."""
_PLAIN = {Tensor}
_SHARED = threading.RLock()
"""Lock held while a draw fills the slots of a network that cannot be copied, because compiled code runs one module object."""
MIN_OPERATIONS_FOR_LOOP = 2**37
"""A pass with at least this many operations keeps a GPU busy for longer than the host takes to launch it. For such passes, a loop
is faster than `vmap`. On an H200, with GPT-2 in bfloat16, 8 x 512 tokens and five draws, `vmap` takes as long as 1.14 passes for
an existing draw, and a loop takes 1.09 passes even for a fresh draw."""
CHECKPOINTS = "the network runs layers again in the backward pass (gradient checkpointing)"
TURN_OFF = "turn gradient checkpointing off (Hugging Face: model.gradient_checkpointing_disable())"
MAX_CHANGES = 8
"""After so many passes in a row that changed the network, its draws run in a loop. Fewer passes may fill caches."""
SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"
FILTERS = threading.RLock()
"""Lock held while warnings are turned off or turned into errors, because this affects all threads."""


def _fill(slots: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]) -> None:
    for (place, leaf), value in zip(slots, values, strict=True):
        place[leaf] = value


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]


class _State:
    """The inputs of a pass: all parts, and the versions of tensors. The parts are kept alive, because a new part could otherwise
    get the id of an old one."""

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        plain, given = not kwargs and set(map(type, args)) == _PLAIN, (*args, *kwargs.values())
        self._parts = given if plain else parts_of(*given) or pytree.tree_leaves(given)
        self._versions = [
            part._version if isinstance(part, Tensor) and not part.is_inference() else 0 for part in self._parts
        ]

    def differs(self, other: "_State") -> bool:
        """Whether the network changed its inputs between the two states."""
        if self._versions != other._versions:
            return True
        return any(one is not two for one, two in zip(self._parts, other._parts, strict=True))


def _is_noticed(error: BaseException | None) -> bool:
    """Whether an error, or an error from which it was raised, says that the network uses gradient checkpointing."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):  # an error can be its own cause
        if CHECKPOINTS in str(error):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


class SlowVmap(Exception):
    """Raised if `vmap` runs but loops internally over an operation without a batching rule."""


class StateInVmap(Exception):
    """Raised if a network changes its own state under `vmap`, because tensors made there are invalid afterwards.

    With `again`, it has done so in several passes in a row. Some networks change their state only in a few passes, for example to
    fill a cache.
    """

    def __init__(self) -> None:
        super().__init__("it changes its own attributes or buffers")
        self.again = False


class _Surroundings:
    """What a pass can change although it is not part of the copy: buffers in place, and tensors in objects that modules hold."""

    def __init__(self, network: nn.Module) -> None:
        self._versions = [(one, one._version) for one in network.buffers() if not one.is_inference()]
        self._held = [(held, held.copy()) for module in network.modules() for held in attributes_of_objects(module)]

    def changed(self) -> bool:
        """Whether a buffer was changed or an object got another tensor. Objects then get back what they held."""
        found = any(one._version != version for one, version in self._versions)
        for now, before in self._held:
            if any(isinstance(value, Tensor) and value is not before.get(key) for key, value in list(now.items())):
                found = True
                for key in now.keys() - before.keys():
                    del now[key]
                now.update(before)
        return found


class Vmaps:
    """Records for each purpose (draws, gradients or inducing inputs) whether `vmap` works on the modules of one network."""

    def __init__(self, earlier: "Vmaps | None" = None) -> None:
        # Passes in a row that changed the network, and purposes that were refused for this reason. Some networks make a module in
        # every pass, so both survive new decisions.
        self.changes: dict[tuple[str, bool | None], int] = earlier.changes if earlier else {}
        self.changing: set[str] = earlier.changing if earlier else set()
        self.refused = set(self.changing)
        self._quick: set[tuple[str, bool | None]] = set()

    def run(self, function: Callable[[], Result], what: str, network: nn.Module | None = None) -> Result:
        """Run a function that calls `vmap`. If torch warns that `vmap` loops over an operation, raise `SlowVmap`.

        If the function fails, the generators of this thread and the buffers of `network` are restored. If the function changes
        the network, the change is undone, and `StateInVmap` is raised. After the first call that succeeds for a purpose and a mode
        of the network, torch's warnings are not checked again, and only the generators are restored, and only in training mode.
        """
        if torch.compiler.is_compiling():
            return function()
        key = (what, None if network is None else any(part.training for part in network.modules()))
        try:
            if key in self._quick:
                restore = backup((), owned_generators()) if key[1] else None
                try:
                    found = function()
                except Exception:
                    if restore is not None:
                        restore()  # The loop draws the same numbers as in a resumed run, whose first pass restores all.
                    raise
                if self.changes:
                    self.changes.pop(key, None)
                return found
            buffers, around = ((), None) if network is None else (network.buffers(), _Surroundings(network))
            restore = backup(buffers, owned_generators())
            with FILTERS, warnings.catch_warnings():
                warnings.filterwarnings("error", message=SLOW_VMAP)
                try:
                    found = function()
                    if around is not None and around.changed():
                        raise StateInVmap
                except Exception as error:
                    restore()
                    if around is not None:
                        around.changed()
                    if isinstance(error, UserWarning) and str(error).startswith(SLOW_VMAP):
                        raise SlowVmap(str(error)) from error
                    raise
        except StateInVmap as error:
            self.changes[key] = self.changes.get(key, 0) + 1
            error.again = self.changes[key] >= MAX_CHANGES
            raise
        self.changes.pop(key, None)
        self._quick.add(key)
        return found


class RowCost(NamedTuple):
    """Number of bytes per example in a pass of one draw: for all activations together, and for the output."""

    activations: float
    output: float


class Decisions:
    """Decisions on how to run a network; they are valid as long as the network has the same modules of the same types."""

    def __init__(self, modules: list[nn.Module], weights: Mapping[str, Weight], earlier: Vmaps | None = None) -> None:
        self._modules = modules  # keeps the modules alive, so that their ids stay unique
        self._kinds = dict(zip(map(id, modules), map(type, modules), strict=True))
        kinds = set(self._kinds.values())
        self.recurrent = any(issubclass(kind, nn.RNNBase) for kind in kinds)
        self._loops = any(issubclass(kind, NO_BATCHING_RULE) for kind in kinds)
        # If each draw has its own kernel, a convolution becomes a grouped convolution, which is slower than a loop.
        self._loops |= any(weight.kind == "matrix" and len(weight.shape) > 2 for weight in weights.values())
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        self._configured = [module for module in modules if "config" in module.__dict__]
        self.vmaps = Vmaps(earlier)
        self.row_costs: dict[Hashable, RowCost] = {}  # by shapes and types of the inputs

    def hold(self, modules: list[nn.Module]) -> bool:
        """Whether the decisions were made for these modules of these types, and perhaps for others."""
        now = dict(zip(map(id, modules), map(type, modules), strict=True))
        return now == self._kinds or now.items() <= self._kinds.items()

    def mode(self, evaluate: bool, purpose: str) -> Mode:
        """How to run several draws. BatchNorm in training mode requires a loop; with `evaluate`, no layer is in training mode."""
        if self._loops or purpose in self.vmaps.refused:
            return "loop"
        for norm in self._norms:
            if (norm.training and not evaluate) or norm.running_mean is None:
                return "loop"
        # The config of a Hugging Face model says whether the model returns a key-value cache.
        for module in self._configured:
            if getattr(module.__dict__.get("config"), "use_cache", False) is True:
                return "rows"
        return "vmap"


class RunState:
    """State that the runners of one network share: reusable copies, and decisions about the network's modules.

    Decisions are made again when the modules of the network, or their types, have changed. Copies and pickles of this object are
    empty, because its content refers to the module objects of one network.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self.copies = FreeCopies()
        self.checkpoints = False  # whether the network saves tensors in its own way, as gradient checkpointing does
        self.passed: set[bool] = (
            set()
        )  # values of `network.training` in passes with gradients that saved tensors as usual
        self._weights = weights
        self._decisions: Decisions | None = None
        self.aliases = {name: tuple(weight.aliases) for name, weight in weights.items() if weight.aliases}
        names = [*weights, *(alias for aliases in self.aliases.values() for alias in aliases)]
        self.owners = {name.rpartition(".")[0] for name in names}  # paths of the modules from which weights were taken
        self.numel = sum(weight.numel for weight in weights.values())

    def __reduce__(self) -> tuple[type[Self], tuple[Mapping[str, Weight]]]:
        return type(self), (self._weights,)

    def decisions(self, modules: list[nn.Module]) -> Decisions:
        """Decisions for a network with these modules. Modules that are stored in attributes and not as children may be omitted."""
        known = self._decisions
        if known is None or not known.hold(modules):
            known = Decisions(modules, self._weights, None if known is None else known.vmaps)
            if not torch.compiler.is_compiling():
                self._decisions = known
        return known


class Runner:
    """A network with empty slots for its weights, and the ways to run draws through it.

    A pass runs a copy of the network that shares the network's tensors (see `LightCopy`). The copy has its own slots, modes and
    hooks. Several threads can therefore use one network. Values that the network's own code assigns to its attributes and buffers
    are written back after the pass. Passes with `vmap`, and passes of a runner from `evaluating`, write nothing back.

    `weights` describes, by name, the weights that were taken out of the network. `point_values` replace the network's own
    parameters and buffers; `snapshot` uses them to freeze the current values. With `evaluate`, passes run in evaluation mode,
    whatever the network's own mode is. Runners of the same network and weights may share a `state`.
    """

    def __init__(
        self,
        network: nn.Module,
        weights: Mapping[str, Weight],
        point_values: WeightDict | None = None,
        *,
        evaluate: bool = False,
        state: RunState | None = None,
    ) -> None:
        self.network = network
        self.weights = weights
        self.point_values = point_values or {}
        self.evaluate = evaluate
        self.state = state or RunState(weights)

    def evaluating(self) -> "Runner":
        """The same network, in evaluation mode."""
        return Runner(self.network, self.weights, self.point_values, evaluate=True, state=self.state)

    def snapshot(self) -> "Runner":
        """The same network with its point estimates and buffers frozen at their current values."""
        kinds = self.network.named_parameters, self.network.named_buffers
        frozen = {name: value.detach().clone() for kind in kinds for name, value in kind(remove_duplicate=False)}
        return Runner(self.network, self.weights, frozen, evaluate=self.evaluate, state=self.state)

    @contextmanager
    def alone(self, *, hooks: bool = True, share: bool = False, again: bool = False) -> "Iterator[Pass]":
        """A runner with its own `LightCopy` of the network, for several passes or for hooks.

        With `share`, passes fill only the slots of the weights, so leaf modules without such slots are not copied. With `again`,
        the runner serves a single pass in the network's own mode and may therefore reuse a copy from an earlier pass.
        """
        if torch.compiler.is_compiling():
            with modes_kept(self.network.modules(), evaluate=self.evaluate):
                yield Pass(self, None)
            return
        keeps = self.state.checkpoints and torch.is_grad_enabled()
        copies, owners = self.state.copies, self.state.owners if share and not self.point_values and not keeps else None
        again = again and not self.evaluate and not hooks and not keeps
        make = partial(LightCopy, self.network, evaluate=self.evaluate, hooks=hooks, known=copies.known)
        copied = copies.take(self.network, owners) if again else make(owners=owners)
        if not copied.complete:
            with _SHARED, modes_kept(self.network.modules(), evaluate=self.evaluate):
                yield Pass(self, None)
            return
        own = Pass(self, copied, None if hooks else make)
        yield own
        if own.left is not None:
            return
        assert own.copied is not None
        again, copied = again and own.copied is copied, own.copied
        copied.empty()
        if copied.places[0] and own.decisions().recurrent:
            refresh_recurrent(copied.root)
        if again:
            copies.put(copied, owners, unchanged=own.unchanged)

    @contextmanager
    def hooked(self, modules: Iterable[nn.Module], hook: Callable[..., Any]) -> "Iterator[Pass]":
        """`alone`, with a forward hook on some of the network's modules. The hook gets the network's module, not its copy."""
        with ExitStack() as stack:
            own = stack.enter_context(self.alone())
            for module in modules:
                copied = own.module(module)
                stack.callback(copied.register_forward_hook(lambda _, *call, module=module: hook(module, *call)).remove)
            yield own

    def decisions(self) -> Decisions:
        """Decisions for the network's modules."""
        return self.state.decisions(list(self.network.modules()))

    def module(self, original: nn.Module) -> nn.Module:
        """The module that this runner runs in place of the network's module `original`; see `alone`."""
        return original

    def call(
        self, values: WeightDict, args: Args, kwargs: Kwargs, *, protect: bool = True, method: str = "__call__"
    ) -> Any:
        """Run one forward pass, or another `method` such as `"generate"`, with one draw.

        `values` are weights and buffers by name, without the draws axis; a tied weight is keyed by its first name. With
        `protect=True`, the network gets copies of the inputs, because it may change its inputs in place.
        """
        if torch.compiler.is_compiling():
            return Pass(self, None).call(values, args, kwargs, protect=protect, method=method)
        with self.alone(hooks=False, share=values.keys() <= self.weights.keys(), again=True) as own:
            output = own.call(values, args, kwargs, protect=protect, method=method)
            own.give_back()
        return output

    def mode(self, num_draws: int) -> Mode:
        """How to run `num_draws` draws. Everything gains from `vmap`, except a single draw, networks that need a loop (see
        `Decisions`), and large passes on a GPU (see `MIN_OPERATIONS_FOR_LOOP`).

        `vmap` cannot return the key-value cache of a transformer. If only weights of linear layers are drawn in such a network, the
        draws run as rows of one batch.
        """
        if num_draws == 1:
            return "single"
        mode = self.decisions().mode(self.evaluate, self._purpose)
        if mode == "vmap" and self.state.checkpoints and torch.is_grad_enabled():
            return "loop"
        return "loop" if mode == "rows" and not can_take_rows(self.network, self.weights) else mode

    def run(
        self, values: WeightDict, args: Args, kwargs: Kwargs, *, mode: Mode | None = None, buffers: Buffers = None
    ) -> Any:
        """The network's output for all draws over the same inputs, with a leading axis of S draws in every tensor.

        `values` are weights by name, [S, *shape]; a tied weight is keyed by its first name. `buffers` contains one dict of
        buffers per draw; if the draws run in a loop, the network may update these buffers in place.
        """
        with self.alone(hooks=False, share=buffers is None, again=count_draws(values) == 1) as own:
            outputs = own.run(values, args, kwargs, mode=mode, buffers=buffers)
            own.give_back()
        return outputs

    @property
    def _purpose(self) -> str:
        """Key of refusals of `vmap`. Networks can do other things in training than in evaluation."""
        return "draws" if self.evaluate or not self.network.training else "draws in training"

    def refuse_vmap(self, refusal: Exception) -> None:
        """Record that `vmap` cannot run the network. Warn about it, unless the reason is that `vmap` is slow, or
        gradient checkpointing."""
        vmaps = self.decisions().vmaps
        vmaps.refused.add(self._purpose)
        if isinstance(refusal, StateInVmap):
            vmaps.changing.add(self._purpose)
        if not isinstance(refusal, SlowVmap) and not _is_noticed(refusal):
            reason = str(refusal).strip().splitlines()[0]
            name = type(self.network).__name__
            warnings.warn(
                f"{name}: vmap refused the network ({reason}); the draws run in a loop instead, which is slower",
                stacklevel=4,
            )


class Pass(Runner):
    """A runner whose network is a private copy or is protected by a lock. It fills the network's slots and runs the network.

    Gradient checkpointing runs layers again in the backward pass. If the network may use gradient checkpointing, the copy keeps
    the weights of the call, and the next call runs another copy, from `make`. Without `make`, hooks are registered on the copy,
    so the copy keeps the weights of its first call with gradients.
    """

    def __init__(self, runner: Runner, copied: LightCopy | None, make: Callable[[], LightCopy] | None = None) -> None:
        network = runner.network if copied is None else copied.root
        super().__init__(network, runner.weights, runner.point_values, evaluate=runner.evaluate, state=runner.state)
        self.copied, self._make = copied, make
        # Slots, their own values, and the weights that the copy keeps in them for the backward pass
        self.left: tuple[list[tuple[dict[str, Any], str]], list[Any], list[Tensor]] | None = None
        self.places: Places = ([], [])  # slots that the last pass filled, if the network itself runs instead of a copy
        self._known: Decisions | None = None
        self._keeps_state = True
        self.unchanged = False  # whether `give_back` found the copy unchanged

    def evaluating(self) -> Runner:
        """This pass if it is in evaluation mode; otherwise a runner of the same network in evaluation mode."""
        return self if self.evaluate else super().evaluating()

    @contextmanager
    def alone(self, *, hooks: bool = True, share: bool = False, again: bool = False) -> "Iterator[Pass]":
        """The pass itself."""
        yield self

    def decisions(self) -> Decisions:
        """See `Runner`. The decisions are looked up once, because no other code can change the modules."""
        if self._known is None:
            self._known = super().decisions() if self.copied is None else self.state.decisions(self.copied.originals())
        return self._known

    def module(self, original: nn.Module) -> nn.Module:
        return original if self.copied is None else self.copied[original]

    def give_back(self) -> None:
        """After a pass, write back to the network the values that its own code assigned. Values from within a function transform
        are dropped, because they would be invalid after it."""
        if self.copied is None or not self._keeps_state or self.evaluate or transforming():
            return
        slots, own, left = self.left or ([], [], [])
        _fill(slots, own)
        self.unchanged = self.copied.write_back()
        _fill(slots, left)

    def call(
        self, values: WeightDict, args: Args, kwargs: Kwargs, *, protect: bool = True, method: str = "__call__"
    ) -> Any:
        if protect:
            args, kwargs = Untouched(args, kwargs).take()
        named = {**self.point_values, **values}
        if set(map(type, values.values())) != _PLAIN:
            for value in values.values():
                if isinstance(value, LocalWeight):
                    value.begin_pass(batch_size(args, kwargs))
        for name, aliases in self.state.aliases.items():
            if name in values:
                named |= dict.fromkeys(aliases, values[name])
        if torch.compiler.is_compiling():
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        call = (named, args, kwargs, method)
        if not torch.is_grad_enabled():
            return self._call(*call)
        keeps = self.left is None if self._make is None else self.state.checkpoints and not transforming()
        return self._keep(*call) if keeps and self.copied is not None else self._call_and_notice(*call)

    def _call_and_notice(self, named: WeightDict, args: Args, kwargs: Kwargs, method: str) -> Any:
        """Run the network. If it uses gradient checkpointing, run it again by a copy that keeps the weights."""
        guarded, call, before = False, (named, args, kwargs, method), _State(args, kwargs)
        training = self.network.training
        restore = again = None
        if training not in self.state.passed:
            restore = backup(() if transforming() else self._buffers(named), owned_generators())
            again = Untouched(args, kwargs)
            inputs = again.take()
        try:
            with disable_saved_tensors_hooks(CHECKPOINTS):
                guarded = True
                output = self._call(*call)
                self.state.passed.add(training)
                return output
        except Exception as error:
            if not _is_noticed(error):
                raise
            # Compiled code gets the weights as arguments, so it may use gradient checkpointing.
            by_compiler = type(error).__module__.startswith("torch._dynamo")
        changed = before.differs(_State(args, kwargs))
        if guarded and not by_compiler:
            self._check_repetition(changed and not (again is not None and again.whole))
            self.state.checkpoints = True
        if restore is not None:
            restore()
        if changed and again is not None:
            call = (named, *inputs, method)
        if self._make is None or transforming():
            return self._call(*call)
        if guarded:
            self._renew()
        return self._keep(*call)

    def _buffers(self, named: WeightDict) -> list[Tensor]:
        """The network's buffers, and those of the draw."""
        own = dict(self.network.named_buffers())
        return [*own.values(), *(named[name] for name in own.keys() & named.keys())]

    def _check_repetition(self, changed_inputs: bool) -> None:
        """Raise an error if the pass cannot be repeated by a copy that keeps its weights."""
        if self.copied is None:
            reason = "a network with compiled parts cannot be copied"
        elif self._make is None:
            reason = "this method needs several passes of one network"
        elif changed_inputs:
            self.state.checkpoints = True
            reason = "it changed its inputs before"
        else:
            return
        raise RuntimeError(f"{CHECKPOINTS}, but {reason}; {TURN_OFF}")

    def _keep(self, named: WeightDict, args: Args, kwargs: Kwargs, method: str) -> Any:
        """Run the network by a copy that keeps the weights."""
        if self._make is not None and self.copied is not None and (self.left or self.copied.shares_modules):
            self.give_back()
            self._renew()
        return self._call(named, args, kwargs, method, keep=True)

    def _renew(self) -> None:
        """Continue with another copy."""
        assert self._make is not None
        self.copied, self.left, self._known, self._keeps_state = self._make(), None, None, True
        self.network = self.copied.root

    def _call(self, named: WeightDict, args: Args, kwargs: Kwargs, method: str, *, keep: bool = False) -> Any:
        """Fill the slots and run the network. With `keep`, the weights stay in the slots."""
        recurrent = self.decisions().recurrent
        if recurrent:  # these layers keep a list of their weights and need contiguous plain tensors
            formed = {key: one.materialize() for key, one in named.items() if isinstance(one, StructuredWeight)}
            named = {name: value.contiguous() for name, value in {**named, **formed}.items()}
        slots, values = self._slots_of(named), list(named.values())
        before = []
        for (place, leaf), value in zip(slots, values, strict=True):
            before.append(place[leaf])
            place[leaf] = value
        if recurrent:
            refresh_recurrent(self.network)
        try:
            with without_cudnn() if recurrent and self._needs_plain_recurrence(named) else nullcontext():
                output = getattr(self.network, method)(*args, **kwargs)
            for (place, leaf), value in zip(slots, values, strict=True):
                if isinstance(place, dict) and place.get(leaf) is not value and not self.evaluate:
                    self._take_buffers(named, slots)
                    break
            if keep:
                self.left = slots, before, values
            return output
        finally:
            if not keep or self.left is None:
                _fill(slots, before)
                if recurrent:
                    refresh_recurrent(self.network)

    def _take_buffers(self, named: WeightDict, slots: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Copy the values that the network assigned to the draw's own buffers into these buffers."""
        own = dict(self.network.named_buffers())
        for (name, buffer), (place, leaf) in zip(named.items(), slots, strict=True):
            if name in own and isinstance(place, dict) and place[leaf] is not buffer:  # scripted modules have no dicts
                if transforming():
                    raise StateInVmap
                with torch.no_grad():
                    buffer.copy_(place[leaf])

    def _needs_plain_recurrence(self, named: Mapping[str, Tensor]) -> bool:
        """Whether the gradient of a recurrent layer in evaluation mode may be needed. The cuDNN kernels have none."""
        if not torch.is_grad_enabled() or not any(value.is_cuda for value in named.values()):
            return False
        return any(isinstance(module, nn.RNNBase) and not module.training for module in self.network.modules())

    def _slots_of(self, named: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], str]]:
        """For each name, the dict and the key under which the network stores it; cached until the names change."""
        names = list(named)
        holder = self.copied or self
        if holder.places[0] == names:
            return holder.places[1]
        owned = self.copied.owned if self.copied is not None else {}
        slots: list[tuple[dict[str, Any], str]] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = owned.get(path) or owner_of(self.network, name)[0]
            slots.append((owner._parameters if leaf in owner._parameters else owner._buffers, leaf))
        holder.places = names, slots
        return slots

    def run(
        self, values: WeightDict, args: Args, kwargs: Kwargs, *, mode: Mode | None = None, buffers: Buffers = None
    ) -> Any:
        num_draws = count_draws(values)
        mode = mode or self.mode(num_draws)
        if mode == "vmap" and next(iter(values.values())).is_cuda:
            mode = "loop" if self._work(args, kwargs) >= MIN_OPERATIONS_FOR_LOOP else mode
        if not isinstance(values, PlacedWeights) and set(map(type, values.values())) != _PLAIN:
            structured = [value for value in values.values() if isinstance(value, StructuredWeight)]
            if not all(value.batchable for value in structured) or (structured and mode == "rows"):
                mode = "loop"
        if mode == "rows" and not buffers:
            try:
                return self._rows(values, args, kwargs)
            except NotByRows:
                self.decisions().vmaps.refused.add(self._purpose)
        if mode != "vmap":
            return self._loop(values, args, kwargs, buffers)
        together = {name: torch.stack([part[name] for part in buffers]) for name in buffers[0]} if buffers else {}
        try:
            found = partial(self._vmap, {**values, **together}, args, kwargs)
            return self.decisions().vmaps.run(found, "draws", self.network)
        except (RuntimeError, ValueError, SlowVmap, StateInVmap) as refusal:
            if self._make is not None:
                self._renew()  # the network may have stored tensors of the failed call in the copy's attributes
            # Errors in the caller's inputs are raised here, with a plain message.
            outputs = self._loop(values, args, kwargs, buffers)
            if getattr(refusal, "again", True) and (self._make is None or not _is_noticed(refusal)):
                self.refuse_vmap(refusal)
            return outputs

    def _work(self, args: Args, kwargs: Kwargs) -> int:
        """Approximate number of operations of a pass: two per weight for each row, or each token, of the largest input."""
        inputs = [leaf for leaf in _tensors(args, kwargs) if leaf.ndim]
        rows = [leaf.numel() // max(leaf.shape[-1], 1) if leaf.is_floating_point() else leaf.numel() for leaf in inputs]
        return 2 * max(rows, default=0) * self.state.numel

    def _vmap(self, values: WeightDict, args: Args, kwargs: Kwargs) -> Any:
        rebuild: list[Callable[[Any], Any]] = []
        inputs = Untouched(args, kwargs)
        self._keeps_state = False  # tensors that the network stores in its attributes here are invalid afterwards

        def one(weights: dict[str, Tensor]) -> Any:
            tree, build = as_tree(self.call(weights, *inputs.take(last=True), protect=False))
            rebuild.append(build)
            return tree

        with disable_saved_tensors_hooks(CHECKPOINTS) if torch.is_grad_enabled() else nullcontext():
            outputs = torch.func.vmap(one, randomness="different")(dict(values))
        if self.copied is not None and self._make is not None and self.copied.changed():
            raise StateInVmap
        return rebuild[0](outputs)

    def _rows(self, values: WeightDict, args: Args, kwargs: Kwargs) -> Any:
        num_draws, rows = count_draws(values), count_draws(values) * batch_size(args, kwargs)
        tree, build = as_tree(self.call(*as_rows(values, args, kwargs), protect=False))
        return build(split_draws(tree, num_draws, rows))

    def _loop(self, values: WeightDict, args: Args, kwargs: Kwargs, buffers: Buffers) -> Any:
        trees, builds = [], []
        # With a single draw, the network may change its inputs in place, as in a call of the network itself.
        inputs = None if count_draws(values) == 1 and not self.evaluate else Untouched(args, kwargs)
        for index, draw in enumerate(each(values)):
            given = inputs.take() if inputs is not None else (args, kwargs)
            named = {**draw, **buffers[index]} if buffers else draw
            tree, build = as_tree(self.call(named, *given, protect=False))
            trees.append(tree)
            builds.append(build)
        return builds[0](stack(*trees) if set(map(type, trees)) == _PLAIN else pytree.tree_map(stack, *trees))
