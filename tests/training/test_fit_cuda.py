"""`fit`, checkpoints and files on a CUDA device."""

import pytest
import torch
from runs import arguments, loader, network, numbers, same
from training import test_guard as guard

import bayesify
from bayesify.training import Checkpointing, Devices, Steps
from bayesify.training.batches import parse_batch
from bayesify.training.checkpoints import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resume_on_cuda_is_bit_identical(tmp_path, precision):
    path = tmp_path / "run.safetensors"
    whole, part, resumed = network(), network(), network()
    options = {"device": "cuda", "precision": precision}
    state = torch.cuda.get_rng_state()
    expected = bayesify.fit(whole, loader(), **arguments(**options))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert next(whole.parameters()).is_cuda
    calls = []

    class Stop(Exception):
        pass

    class Stopping:
        def __iter__(self):
            for batch in loader():
                calls.append(batch)
                if len(calls) == 10:
                    raise Stop
                yield batch

    with pytest.raises(Stop):
        bayesify.fit(part, Stopping(), **arguments(**options, checkpoint=Checkpointing(path, 1), num_data=44))
    history = bayesify.fit(resumed, loader(), **arguments(**options, checkpoint=path, num_data=44))
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


def test_cuda_trains_as_the_cpu_does():
    """The draws differ (each device has its own random numbers), the MAP phase has none but dropout's."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        bnn = bayesify.bayesianize(net, "mean_field", likelihood="categorical")
        data = [(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2)]
        bayesify.fit(bnn, data, epochs=0, map_epochs=30, learning_rate=0.05, device=device, seed=0, progress=False)
        results.append(bnn.cpu())
    for name, value in results[0].named_parameters():
        torch.testing.assert_close(results[1].get_parameter(name), value, rtol=1e-3, atol=1e-4)


def test_files_move_between_devices(tmp_path):
    path = tmp_path / "m.safetensors"
    bnn = network().cuda()
    bayesify.save(bnn, path)
    plain = network().mean_network()
    on_cpu, on_cuda = bayesify.load(path, plain), bayesify.load(path, plain, map_location="cuda")
    assert next(on_cuda.parameters()).is_cuda
    assert not next(plain.parameters()).is_cuda
    assert same(on_cpu, bnn.cpu())
    assert same(on_cuda.cpu(), on_cpu)


def test_two_processes_of_more_devices_than_there_are():
    count = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=rf"Devices\({count}\)"):
        bayesify.fit(network(), loader(), **arguments(device=Devices(count, "cuda")))


@pytest.mark.parametrize("bad", [0, 2, 5])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("steps", [Steps(scheduler="step"), Steps(2, 1.0, "step"), Steps(4), Steps(clip_norm=0.1)])
def test_gradients_that_are_not_finite_change_nothing(tmp_path, bad, fused, steps):
    """A fused optimizer hears of them on the device and the host later, another one at once; the state is the same."""
    path = tmp_path / "r"
    adam = lambda p: torch.optim.Adam(p, lr=0.01, fused=fused)  # noqa: E731
    bnn, watched, whole = guard.refused(bad, steps, adam, Checkpointing(path, 2), device="cuda")
    if not whole:
        assert guard.equal(dict(bnn.state_dict()), dict(guard.network().cuda().state_dict()))
        assert not path.exists()
        states = watched.optimizer.state_dict()["state"].values()
        assert all(float(value["step"]) == 0 and not value["exp_avg"].any() for value in states)
        return
    beside = guard.as_after(whole, steps, bnn, watched, device="cuda")
    assert watched.optimizer.param_groups[0]["lr"] == pytest.approx(beside.optimizer.param_groups[0]["lr"])
    if path.exists():
        stored = Checkpoint.read(path).model
        assert all(torch.isfinite(value).all() for value in stored.values())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_nothing():
    """With a fused optimizer the host reads nothing of the device in the steps, once the objective looks at no values."""
    from bayesify.predictor import Trainable
    from bayesify.training.arguments import Run, Settings, Steps
    from bayesify.training.distributed import Processes
    from bayesify.training.schedules import KLSchedule
    from bayesify.training.step import Step

    class Plain(Trainable):
        """The objective without looks at values."""

        training_draws = 1
        module = property(lambda self: self.net)

        def __init__(self, net):
            self.net = net

        def config(self):
            return {}

        def terms(self, batch, *, phase, num_data, num_draws, generator=None):
            return -(self.net(batch.x) - batch.y).square().sum().view(1), self.net.weight.square().sum().view(1)

    net = torch.nn.Linear(3, 1).cuda()
    settings = Settings(48, 1, 0, 1.0, KLSchedule(), 1, "float32", None, 1, Steps(2, 1.0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    step = Step(Plain(net), optimizer, None, Run(settings, 0), Processes())
    parts = [(batch.to("cuda"), 8, 8) for batch in map(parse_batch, guard.batches())]
    step("variational", parts[:2], 1.0, 0.0, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for first in range(0, 6, 2):
            step("variational", parts[first : first + 2], 1.0, 0.0, first + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()
    assert all(torch.isfinite(torch.tensor(step.sums.values.tolist())))
