"""Draws on a GPU with few kernel launches, made by special kernels or by CUDA graphs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function
from bayesify.maths.fused_draws import DrawPlan, Joined, Place, fused_draws
from bayesify.maths.noise import NoiseSource, SeededNoise
from bayesify.maths.value_checks import transforming
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.running.caching import computed_anew, settled
from bayesify.running.cuda_graphs import CAPTURE_LOCK, Captured, Captures, side_stream
from bayesify.weights.layout import NetworkLayout, PlacedWeights, strides_of
from bayesify.weights.module_state import swapped
from bayesify.weights.named_parameters import first_parameter, tensors_in

MAX_MEMORY_SHARE = 1 / 16
"""Largest share of a device's memory that the draws of a captured request may take in float32. A graph keeps this memory."""

MAX_KINDS = 16
"""Number of request kinds that a posterior remembers. It remembers the most recent kinds. Requests with different
generators have different kinds."""

MAX_PARAMETERS_TO_FOLLOW = 2**23
"""Up to this many parameters, the graph of a single draw recomputes the values that draws share, which costs device
time. A graph that keeps these values must first check that the parameters are unchanged, and the host waits for this
check (see `in_turns` in benchmarks/results/networks_gpu.json)."""

Drawn = tuple[MutableMapping[str, Tensor], Tensor]
"""Weights by name, and their KL."""


class CapturedDraws:
    """Draws from the posteriors of one network. CUDA graphs make the draws if this is possible and faster. The network stores
    this object.

    A graph works on fixed memory. If gradients are off, the graph's results are copied to new memory. If gradients are on, the
    results are used in place. Only the training objective uses the results in place, because it does not store the draws. Until
    the backward pass of a training objective has run, the graph's memory is in use, and a second evaluation of the objective
    makes its draws without a graph. The random numbers are the same with and without a graph. Graphs belong to the memory of one
    network, so copies of the network have none.
    """

    def __init__(self) -> None:
        self._captures: weakref.WeakKeyDictionary[Posterior, Captures[CapturedDraw]] = weakref.WeakKeyDictionary()

    def of(self, posterior: Posterior) -> Captures[CapturedDraw]:
        """The captured draws of one posterior."""
        return self._captures.setdefault(posterior, Captures(MAX_KINDS))

    def draw(self, posterior: Posterior, request: DrawRequest) -> Drawn:
        """Draw from a posterior."""
        with settled():
            if not _suits(posterior, request):
                return posterior.draw(request)
            with CAPTURE_LOCK:
                kind, addresses = _kind(posterior, request)
                drawn = None if posterior.results.is_settled() else self._ahead(posterior, kind, addresses)
                if drawn is not None:
                    return drawn
                training = torch.is_grad_enabled()
                # A graph reads the current parameters. Values that were computed from them before the capture stay fixed.
                keeps = not training and not _follows(posterior, request) and posterior.results.values()
                state = addresses, posterior.results.state(posterior) if keeps else None
                make, held = lambda: CapturedDraw(posterior, request, training), request.noise.generator
                captured = self.of(posterior).find(kind, state, make, held=held)
                if captured is not None and not captured.busy():
                    return captured.replay()
            return posterior.draw(request)

    def _ahead(self, posterior: Posterior, kind: tuple[Any, ...], addresses: tuple[int, ...]) -> Drawn | None:
        """A draw made by the most recent graph. While the graph runs, the parameters are compared with the values that they had
        when the graph was captured.

        If the parameters differ, the result is `None`, and the generator is reset unless another thread has used it in the
        meantime.
        """
        known = self.of(posterior).known(kind)
        if known is None or known.made is None:
            return None
        captured, (places, frozen) = known.made, known.state
        if frozen is None or places != addresses:
            return None
        generator = captured.generator
        before = generator.get_state()

        def replay() -> tuple[Drawn, Tensor]:
            return captured.replay(), generator.get_state()

        (drawn, after), same = posterior.results.run_beside_comparison(posterior, frozen, replay)
        if same:
            return drawn
        if torch.equal(generator.get_state(), after):
            generator.set_state(before)
        return None


def _kind(posterior: Posterior, request: DrawRequest) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The kind of request that a graph serves, and the addresses of the parameters that the graph reads."""
    asked = (request.num_draws, request.antithetic, request.num_data, request.autocast)
    scales, stream = tuple(request.prior.std.values()), torch.cuda.current_stream().cuda_stream
    key = (torch.is_grad_enabled(), *asked, id(request.noise.generator), scales, stream)
    return key, tuple(map(Tensor.data_ptr, tensors_in(posterior)))


def _follows(posterior: Posterior, request: DrawRequest) -> bool:
    """Whether the graph recomputes values that a draw without a graph takes from the cache: true for a single draw from a
    posterior with few parameters."""
    return (
        request.num_draws == 1
        and sum(map(Tensor.numel, tensors_in(posterior, buffers=False))) <= MAX_PARAMETERS_TO_FOLLOW
    )


def _suits(posterior: Posterior, request: DrawRequest) -> bool:
    if not posterior.capturable or torch.compiler.is_compiling() or type(request.noise) is not NoiseSource:
        return False
    device = first_parameter(posterior).device
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    if torch.is_grad_enabled() != request.local or torch.is_inference_mode_enabled():
        return False  # draws that a user keeps must not be in the graph's memory
    where = device if request.noise.generator is None else request.noise.generator.device
    if where.type != device.type or where.index not in (None, device.index):  # `torch.Generator("cuda")` names no GPU
        return False
    if not request.prior.fixed or posterior.draws_fused(request):
        return False
    numbers = posterior.results.constant(
        posterior, "numbers", lambda: sum(weight.numel for weight in posterior.weights)
    )
    return 4 * request.num_draws * numbers <= MAX_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory


class CapturedDraw:
    """One captured draw and its captured gradient."""

    def __init__(self, posterior: Posterior, request: DrawRequest, training: bool) -> None:
        self.training = training
        named = {name: value for name, value in posterior.named_parameters() if value.requires_grad}
        self.parameters = list(named.values())
        self.pending: weakref.ref[_Use] | None = None
        # A loss that the caller still holds ties the parameters' gradients to the stream of the loss, which a capture
        # forbids.
        leaves = {name: value.detach().requires_grad_() for name, value in named.items()} if training else {}

        def run(request: DrawRequest = request) -> list[Tensor]:
            with swapped(posterior, leaves), computed_anew() if _follows(posterior, request) else nullcontext():
                weights, kl = posterior.draw(replace(request, chosen={}))
            self.names = list(weights)
            return [*(weights.values() if training else self._joined(weights, request.layout)), kl]

        def gradient(outputs: list[Tensor], slopes: list[Tensor]) -> tuple[Tensor | None, ...]:
            live = [(out, grad) for out, grad in zip(outputs, slopes, strict=True) if out.requires_grad]
            return torch.autograd.grad(
                [out for out, _ in live], list(leaves.values()), [grad for _, grad in live], allow_unused=True
            )

        device = self.parameters[0].device
        self.generator = request.noise.generator or torch.cuda.default_generators[device.index or 0]
        # Other generators do not change.
        trial = replace(request, noise=NoiseSource(torch.Generator(device).manual_seed(0)))
        with side_stream():
            for _ in range(3):
                outputs = run(trial)
                if training:
                    gradient(outputs, [torch.zeros_like(output) for output in outputs])
            del outputs
        before = self.generator.get_state()
        self.forward = Captured(run, generators=[request.noise.generator])
        self.generator.set_state(before)
        if training:
            outputs = self.forward.results
            slopes = [torch.zeros_like(output) for output in outputs]
            self.backward = Captured(lambda: gradient(outputs, slopes), slopes, pool=self.forward.pool())
            self.forward.results = [output.detach() for output in outputs]
        self.kept = posterior.results.values()  # keep these values alive, because the graph reads their memory

    def _joined(self, weights: Mapping[str, Tensor], layout: NetworkLayout | None) -> list[Tensor]:
        """Copy all weights of the same dtype into one block of memory, with the memory layout that the network uses. A single
        copy operation can then copy the whole block."""
        self.places: dict[str, tuple[int, Place]] = {}
        placed = weights.places() if isinstance(weights, PlacedWeights) else None
        if placed is not None:  # a kernel has already written this layout
            flats = list({id(flat): flat for flat, *_ in placed.values()}.values())
            which = {id(flat): at for at, flat in enumerate(flats)}
            self.places = {name: (which[id(place[0])], place) for name, place in placed.items()}
            return flats
        pieces: list[Tensor] = []
        dtypes = {name: (layout and layout.low_precision.get(name)) or weight.dtype for name, weight in weights.items()}
        for dtype in dict.fromkeys(dtypes.values()):
            names = [name for name, kind in dtypes.items() if kind == dtype]
            layouts = []
            for name in names:
                size, stride = strides_of(layout, name, weights[name].shape[1:])
                layouts.append(((len(weights[name]), *size), (math.prod(size), *stride)))
            joined = Joined(layouts)
            piece = torch.empty(joined.total, dtype=dtype, device=weights[names[0]].device)
            places = zip(joined.views(piece), [weights[name] for name in names], strict=True)
            views, values = zip(*(_in_wide_numbers(*place) for place in places), strict=True)
            torch._foreach_copy_(views, values)
            self.places |= {name: (len(pieces), place) for name, place in zip(names, joined.places(piece), strict=True)}
            pieces.append(piece)
        return pieces

    def busy(self) -> bool:
        """Whether a training objective that uses this graph's draws still needs its backward pass."""
        use = self.pending() if self.pending is not None else None
        return use is not None and not use.finished

    def replay(self) -> Drawn:
        """Draw. If gradients are on, the results are used in place; otherwise they are copied to new memory."""
        if self.training:
            use = _Use()
            if self.pending is not None and (last := self.pending()) is not None:
                last.overwritten = True
            self.pending = weakref.ref(use)
            outputs = list(replay(self, use, *self.parameters))
            return dict(zip(self.names, outputs[:-1], strict=True)), outputs[-1]
        *pieces, kl = [output.clone() for output in self.forward.replay()]
        found: list[Place] = []
        for name in self.names:
            at, (_, size, stride, start) = self.places[name]
            found.append((pieces[at], size, stride, start))
        return PlacedWeights(self.names, found), kl


def _in_wide_numbers(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """View two tensors of equal shape as 16-byte elements, if their alignment allows it and if the rows of `source` have gaps
    between them. A plain copy of rows with gaps would move one number at a time."""
    if target.dtype != source.dtype or source.is_contiguous() or not target.is_contiguous() or source.stride(-1) != 1:
        return target, source
    count = 16 // source.element_size()
    parts = (source.shape[-1], source.storage_offset(), target.storage_offset(), *source.stride()[:-1])
    if source.is_complex() or any(part % count for part in parts):
        return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


class _Use:
    """State of one replay. The state lives as long as the replay's autograd node."""

    finished = False
    overwritten = False


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, captured: CapturedDraw, use: _Use, *parameters: Tensor) -> Any:
        ctx.captured, ctx.use = captured, use
        return tuple(output.detach() for output in captured.forward.replay())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.use.overwritten:
            raise RuntimeError(
                "elbo: backward was called on an elbo after the next elbo was computed; call backward once on each "
                "elbo, before you compute the next one"
            )
        found = ctx.captured.backward.replay(grads)
        ctx.use.finished = True
        # Copy the gradients, because accumulated gradients are kept beyond the next replay.
        return None, None, *(None if grad is None else grad.clone() for grad in found)


replay: Callable[..., tuple[Tensor, ...]] = _Replay.apply


def kernels_suit(request: DrawRequest, like: Tensor) -> bool:
    """Whether kernels can make the requested draws. This requires that kernels generate the noise, and that the prior has fixed
    scales and mean 0."""
    return (
        type(request.noise) is NoiseSource
        and request.noise.by_kernel(like)
        and request.prior.fixed
        and not transforming()
    )


def draw_by_kernels(
    posterior: Posterior,
    request: DrawRequest,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    make: Callable[[list[float]], DrawPlan | None],
) -> tuple[MutableMapping[str, Tensor], Tensor] | None:
    """Draw weights with the kernels of a `DrawPlan`, or return `None` if `make` returns no plan. For the same seed, the draws
    equal those of `posterior.draw`.

    `names` lists the weights in the order of the plan, and `parameters` has the order of the plan's gradients. `make` makes a
    plan from the prior standard deviations of the weights `names`. `make` is called once for each set of parameter addresses and
    each kind of request.
    """
    addresses = tuple(map(Tensor.data_ptr, parameters))
    key = (addresses, tuple(request.prior.std.values()), request.num_draws, request.antithetic, id(request.layout))
    plan = posterior.results.recent(key, lambda: make([float(request.prior.std[name]) for name in names]))
    if plan is None:
        return None
    seed = request.noise.seed(parameters[0].device)
    if not torch.is_grad_enabled():
        places, kl = plan.draw(seed)
        return PlacedWeights(names, places), kl
    # The backward pass must not hold the draws of the request: such a reference cycle would outlive the step.
    alone = replace(request, weights=None, chosen={}, runner=None)

    def reference(seed: Tensor) -> tuple[list[Tensor], Tensor]:
        drawn, kl = posterior.draw(replace(alone, noise=SeededNoise(seed)))
        return [drawn[name] for name in names], kl

    draws, kl = fused_draws(plan, reference, seed, parameters)
    return dict(zip(names, draws, strict=True)), kl
