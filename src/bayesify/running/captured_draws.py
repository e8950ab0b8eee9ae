"""Draws captured as CUDA graphs: one launch in place of hundreds."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.maths.fused_draws import Joined, Place
from bayesify.maths.noise import NoiseSource
from bayesify.running.caching import (
    cached_values,
    computed_anew,
    constant,
    is_settled,
    parameter_state,
    run_beside_comparison,
    settled,
)
from bayesify.running.cuda_graphs import WARMUP_CALLS, capture, side_stream
from bayesify.weights.layout import NetworkLayout, strides_of
from bayesify.weights.module_state import swapped
from bayesify.weights.named_parameters import MASK, first_parameter, tensors_in
from bayesify.weights.placed import PlacedWeights

if TYPE_CHECKING:
    from bayesify.posteriors.common.base import DrawRequest, Posterior

LARGEST_SHARE = 1 / 16
"""Of a device's memory that the draws of a request take in float32, above which a graph is not worth what it keeps."""

MOST_CAPTURES = 16
"""Kinds of requests that are cached for a posterior, the last ones: each generator is a kind of its own."""

FOLLOWS = 2**23
"""Parameters up to which the graph of a single draw computes what draws share from them each time. It takes the device some time,
but to compare the parameters with those of a graph that keeps it, the host must wait for the device. On an H200 a draw of a
ResNet-50 (6 million) and its pass took 1.23 passes in place of 1.45, of a ViT-B/16 (13 million) 1.29 in place of 1.17 (see
`in_turns` in benchmarks/results/networks_gpu.json)."""

_LOCK = threading.RLock()
_CAPTURES: weakref.WeakKeyDictionary[Posterior, dict[Any, Any]] = weakref.WeakKeyDictionary()


def draw(posterior: Posterior, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
    """Draw from a posterior, by a captured CUDA graph where that is possible and pays.

    A graph works on fixed memory. Without gradients its results are copied out. With gradients (inside the training
    objective, where nobody keeps the draws) they are used in place, so a second bound that is made before the first
    one's backward pass is drawn without a graph. The random numbers are those of a draw without a graph.
    """
    with settled():
        if not _suits(posterior, request):
            return posterior.draw(request)
        with _LOCK:
            key, addresses = _kind(posterior, request)
            drawn = None if is_settled(posterior) else _ahead(posterior, key, addresses)
            if drawn is not None:
                return drawn
            captured = _find(posterior, request, key, addresses)
            if captured is not None and not captured.busy():
                return captured.replay()
        return posterior.draw(request)


def _kind(posterior: Posterior, request: DrawRequest) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What a graph is captured for, and where the parameters are that it reads."""
    asked = (request.num_draws, request.antithetic, request.num_data, request.autocast)
    scales, stream = tuple(request.prior.std.values()), torch.cuda.current_stream().cuda_stream
    key = (torch.is_grad_enabled(), *asked, id(request.noise.generator), scales, stream)
    return key, tuple(map(Tensor.data_ptr, tensors_in(posterior)))


def _ahead(
    posterior: Posterior, key: tuple[Any, ...], addresses: tuple[int, ...]
) -> tuple[MutableMapping[str, Tensor], Tensor] | None:
    """A draw by the graph that served last, made while the parameters are compared with those it was captured with.

    Nothing where they differ, and as if nothing was drawn: what is cached of the parameters is part of the graph. Only where
    another thread has taken numbers from the same generator meanwhile, none is given out twice: this draw takes later ones.
    """
    captures = _CAPTURES.get(posterior, {})
    _, (places, frozen), captured, _ = captures.get(key, (0, ((), None), None, None))
    if captured is None or frozen is None or places != addresses:
        return None
    generator = captured.generator
    before = generator.get_state()

    def replay() -> tuple[tuple[MutableMapping[str, Tensor], Tensor], Tensor]:
        return captured.replay(), generator.get_state()

    (drawn, after), same = run_beside_comparison(posterior, frozen, replay)
    if same:
        captures[key] = captures.pop(key)  # the last one used
        return drawn
    if torch.equal(generator.get_state(), after):
        generator.set_state(before)
    return None


def _find(
    posterior: Posterior, request: DrawRequest, key: tuple[Any, ...], addresses: tuple[int, ...]
) -> _Captured | None:
    """The graph for a request, captured now if it has been asked for often enough."""
    training, generator = torch.is_grad_enabled(), request.noise.generator
    # A graph reads the parameters where they are, but not what was computed from them before it was captured.
    keeps = not training and not _follows(posterior, request) and cached_values(posterior)
    frozen = parameter_state(posterior) if keeps else None
    captures = _CAPTURES.setdefault(posterior, {})
    count, state, captured, _ = captures.pop(key, (0, None, None, None))
    if state != (addresses, frozen):
        count, captured = 0, None
    if captured is None and count >= WARMUP_CALLS:
        try:
            captured = _Captured(posterior, request, training)
        except RuntimeError:  # something forbids it, such as a hook that waits for the device
            count = -sys.maxsize
    captures[key] = (count + 1, (addresses, frozen), captured, generator)  # held, so that no other gets its id
    while len(captures) > MOST_CAPTURES:
        del captures[next(iter(captures))]
    return captured


def _follows(posterior: Posterior, request: DrawRequest) -> bool:
    """Whether the graph of a request computes from the parameters whatever other draws take from what is cached of them."""
    return request.num_draws == 1 and sum(map(Tensor.numel, tensors_in(posterior, buffers=False))) <= FOLLOWS


def _suits(posterior: Posterior, request: DrawRequest) -> bool:
    if not posterior.capturable or torch.compiler.is_compiling() or type(request.noise) is not NoiseSource:
        return False
    device = first_parameter(posterior).device
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    if torch.is_grad_enabled() != request.local or torch.is_inference_mode_enabled():
        return False  # draws that a user keeps must not live in the graph's memory
    where = device if request.noise.generator is None else request.noise.generator.device
    if where.type != device.type or where.index not in (None, device.index):  # `torch.Generator("cuda")` names no GPU
        return False
    if not request.prior.fixed or posterior.draws_fused(request):
        return False
    if any(name.endswith(MASK) for name, _ in posterior.named_buffers()):
        return False  # the gradient of a scatter by mask waits for the device
    size = 4 * request.num_draws * constant(posterior, "numbers", lambda: sum(posterior.sizes().values()))
    return size <= LARGEST_SHARE * torch.cuda.get_device_properties(device).total_memory


class _Captured:
    """One captured draw, and the captured gradient of it."""

    def __init__(self, posterior: Posterior, request: DrawRequest, training: bool) -> None:
        self.training = training
        named = {name: value for name, value in posterior.named_parameters() if value.requires_grad}
        self.parameters = list(named.values())
        self.pending: weakref.ref[_Use] | None = None
        # A loss that the caller still holds ties the parameters' gradients to the stream it was made on, which a capture forbids.
        leaves = {name: value.detach().requires_grad_() for name, value in named.items()} if training else {}

        def run(request: DrawRequest = request) -> list[Tensor]:
            with swapped(posterior, leaves), computed_anew() if _follows(posterior, request) else nullcontext():
                weights, kl = posterior.draw(request)
            self.names = list(weights)
            return [*(weights.values() if training else self._joined(weights, request.layout)), kl]

        def gradient(outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
            live = [(out, grad) for out, grad in zip(outputs, self.grad_outputs, strict=True) if out.requires_grad]
            return torch.autograd.grad(
                [out for out, _ in live], list(leaves.values()), [grad for _, grad in live], allow_unused=True
            )

        device = self.parameters[0].device
        self.generator = request.noise.generator or torch.cuda.default_generators[device.index or 0]
        trial = replace(request, noise=NoiseSource(torch.Generator(device).manual_seed(0)))  # takes nobody's numbers
        with side_stream():
            for _ in range(3):
                outputs = run(trial)
                if training:
                    self.grad_outputs = [torch.zeros_like(output) for output in outputs]
                    gradient(outputs)
            del outputs
        before = self.generator.get_state()
        self.forward_graph, self.outputs = capture(run, [request.noise.generator])
        self.generator.set_state(before)
        if training:
            self.grad_outputs = [torch.zeros_like(output) for output in self.outputs]
            pool = self.forward_graph.pool()
            self.backward_graph, self.grads = capture(lambda: gradient(self.outputs), pool=pool)
            self.outputs = [output.detach() for output in self.outputs]
        self.kept = cached_values(posterior)  # the graph reads their memory, whatever the posterior forgets later

    def _joined(self, weights: Mapping[str, Tensor], layout: NetworkLayout | None) -> list[Tensor]:
        """All weights of a type, the network's, in one piece of memory as the network has them: it is copied out in one go."""
        self.places: dict[str, tuple[int, Place]] = {}
        placed = weights.places() if isinstance(weights, PlacedWeights) else None
        if placed is not None:  # a kernel has written them so
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
        """Whether a bound that was drawn from this graph still waits for its backward pass."""
        use = self.pending() if self.pending is not None else None
        return use is not None and not use.finished

    def replay(self) -> tuple[MutableMapping[str, Tensor], Tensor]:
        if self.training:
            use = _Use()
            if self.pending is not None and (last := self.pending()) is not None:
                last.overwritten = True
            self.pending = weakref.ref(use)
            outputs = list(_Replay.apply(self, use, *self.parameters))
            return dict(zip(self.names, outputs[:-1], strict=True)), outputs[-1]
        self.forward_graph.replay()
        *pieces, kl = [output.clone() for output in self.outputs]
        found: list[Place] = []
        for name in self.names:
            at, (_, size, stride, start) = self.places[name]
            found.append((pieces[at], size, stride, start))
        return PlacedWeights(self.names, found), kl


def _in_wide_numbers(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of equal shape with as many numbers as fit into 16 bytes as one, where rows have gaps but allow it.

    A copy of rows with gaps moves one number at a time.
    """
    if target.dtype != source.dtype or source.is_contiguous() or not target.is_contiguous() or source.stride(-1) != 1:
        return target, source
    count = 16 // source.element_size()
    parts = (source.shape[-1], source.storage_offset(), target.storage_offset(), *source.stride()[:-1])
    if source.is_complex() or any(part % count for part in parts):
        return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


class _Use:
    """What became of one replay: alive while its part of the autograd graph is."""

    finished = False
    overwritten = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, use: _Use, *parameters: Tensor) -> Any:
        ctx.captured, ctx.use = captured, use
        captured.forward_graph.replay()
        return tuple(output.detach() for output in captured.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        captured = ctx.captured
        if ctx.use.overwritten:
            raise RuntimeError(
                "elbo: backward was called again after a later elbo; call it once for each elbo, before the next"
            )
        given = [(mine, grad) for mine, grad in zip(captured.grad_outputs, grads, strict=True) if grad is not None]
        torch._foreach_copy_([mine for mine, _ in given], [grad for _, grad in given])
        for mine, grad in zip(captured.grad_outputs, grads, strict=True):
            if grad is None:
                mine.zero_()
        captured.backward_graph.replay()
        ctx.use.finished = True
        # Copies: an optimizer that accumulates gradients keeps them past the next replay.
        return None, None, *(None if grad is None else grad.clone() for grad in captured.grads)
