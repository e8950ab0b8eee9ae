"""`fit`, checkpoints and files on a CUDA device."""

import pytest
import torch
from training.runs import arguments, loader, network, numbers, same

import bayesify
from bayesify.training import Checkpointing, Devices

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
