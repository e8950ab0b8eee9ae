"""torch's global random generators, which all threads of a process share."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

_IN_USE = threading.RLock()
_OWNED = threading.local()


@contextmanager
def own_generators(devices: Iterable[torch.device | int] = (), *, seed: int | None = None) -> Iterator[None]:
    """Reserve torch's global generators for this thread, and restore them at the end. Other threads that need the generators wait.

    If threads did not wait, two simultaneous training runs would consume each other's random numbers. Predictions with their own
    generator do not need to reserve the global generators.

    The global generators of the GPUs in `devices` are restored in addition to the CPU's generator. Without a seed, the generators
    continue from their current state.
    """
    devices = [device for device in devices if isinstance(device, int) or device.type == "cuda"]
    with _IN_USE, torch.random.fork_rng(devices=devices):
        before = owned_generators()
        places = [device if isinstance(device, int) else device.index or 0 for device in devices]
        _OWNED.now = [*before, torch.default_generator, *(torch.cuda.default_generators[place] for place in places)]
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            _OWNED.now = before


def draw_seed(generator: torch.Generator | None = None, below: int = 2**63 - 1) -> int:
    """A seed, taken from a generator on any device; by default from torch's global generator."""
    device = generator.device if generator is not None else None
    return int(torch.randint(below, (), generator=generator, device=device))


def owned_generators() -> list[torch.Generator]:
    """torch's global generators that this thread has reserved with `own_generators` and therefore may set."""
    return getattr(_OWNED, "now", [])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are known to be equal. torch cannot compare tensors of some kinds, such as sparse ones."""
    try:
        return torch.equal(one, other)
    except (RuntimeError, NotImplementedError):
        return False


def backup(buffers: Iterable[torch.Tensor], generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """A function that restores buffers and random generators, in place, to their present state. While a CUDA graph is captured,
    it restores nothing.

    Buffers that did not change are not written. The version of a buffer stays the same, so graphs that need the buffer stay valid.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    values = [] if capturing else [(buffer, buffer.detach().clone()) for buffer in buffers]
    states = [] if capturing else [(one, one.get_state()) for one in generators]

    def restore() -> None:
        for buffer, value in values:
            if not _equal(buffer, value):
                buffer.data.copy_(value)
        for one, state in states:
            one.set_state(state)

    return restore


def generator_states(device: torch.device) -> dict[torch.device, torch.Tensor]:
    """States of torch's global generators for a device: the CPU's state and, for a GPU, also the GPU's state."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    return found | ({device: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generator_states(states: Mapping[torch.device, torch.Tensor]) -> None:
    """Inverse of `generator_states`."""
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
