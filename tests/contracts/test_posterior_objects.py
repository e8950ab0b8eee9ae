"""A Bayesian network as an object: copies, files, types, the plain network inside, and what it was made from."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from cases import CASES, REFUSED, Case, call, close, convert, generator, tensors, weights_close
from matrix import every_leaf, most_pairs, over, some_pairs
from torch import nn

from bayesify import BayesianNetwork


def outputs(bnn: BayesianNetwork, inputs: Any) -> Any:
    with torch.no_grad():
        return call(bnn.draw(3, generator=generator(5)), inputs)


@some_pairs
def test_state_dict_round_trip(name: str, case: Case) -> None:
    bnn, fresh = convert(name, case), convert(name, case)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(0.5)
    missing = fresh.load_state_dict(bnn.state_dict(), strict=True)
    assert not missing.missing_keys
    close(outputs(fresh, case.batch()), outputs(bnn, case.batch()))


@most_pairs
def test_copies_after_a_forward_pass(name: str, case: Case) -> None:
    bnn, inputs = convert(name, case), case.batch()
    expected = outputs(bnn, inputs)
    call(bnn, inputs)
    call(bnn.draw(2), inputs)  # with gradients: a draw left behind in the network cannot be copied
    pickled, copied = pickle.dumps(bnn), copy.deepcopy(bnn)
    if not case.training:  # running statistics moved
        close(outputs(pickle.loads(pickled), inputs), expected)
        close(outputs(copied, inputs), expected)
    assert copied.posteriors is not bnn.posteriors
    own = {id(parameter) for parameter in bnn.parameters()}
    assert not own & {id(parameter) for parameter in copied.parameters()}
    repr(bnn)


@some_pairs
def test_double_precision(name: str, case: Case) -> None:
    """Made in float64, or moved to it: draws, outputs and KL are float64, and in float32 they differ by rounding only."""
    made = convert(name, case, torch.float64)
    moved = convert(name, case).double()
    for bnn in (made, moved):
        draws = bnn.draw(2, generator=generator())
        assert {value.dtype for value in draws.weights.values()} == {torch.float64}
        assert draws.kl.dtype == torch.float64
        with torch.no_grad():
            results = tensors(call(draws, case.batch(dtype=torch.float64)))
        assert {result.dtype for result in results if result.is_floating_point()} == {torch.float64}
    moved.load_state_dict(made.state_dict())
    close(outputs(moved, case.batch(dtype=torch.float64)), outputs(made, case.batch(dtype=torch.float64)))
    if made.posteriors[0].runs_network:
        return  # its KL is an estimate from a draw, and the random numbers of the two types differ
    single = moved.float()
    assert single.kl(generator=generator()).item() == pytest.approx(
        made.kl(generator=generator()).item(), rel=1e-3, abs=1e-2
    )


@over(["linear", "conv2d", "lstm", "attention"])
def test_bfloat16_network(name: str, case: Case) -> None:
    """A bfloat16 network runs in bfloat16; its posterior keeps float32."""
    bnn = convert(name, case, torch.bfloat16)
    draws = bnn.draw(2, generator=generator())
    assert {value.dtype for value in draws.weights.values()} == {torch.bfloat16}
    assert draws.kl.dtype == torch.float32
    assert {parameter.dtype for parameter in bnn.posteriors.parameters()} == {torch.float32}
    with torch.no_grad():
        assert tensors(call(draws, case.batch(dtype=torch.bfloat16)))[0].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in bnn.mean_network().parameters()} == {torch.bfloat16}


@most_pairs
def test_mean_network(name: str, case: Case) -> None:
    bnn, original, inputs = convert(name, case), case.network(), case.batch()
    plain = bnn.mean_network()
    assert type(plain) is type(original)
    found = dict(plain.named_parameters(remove_duplicate=False))
    for key, value in original.named_parameters(remove_duplicate=False):
        assert (found[key].shape, found[key].stride()) == (value.shape, value.stride())
    for weight in bnn.weights.values():
        assert all(found[alias] is found[weight.name] for alias in weight.aliases)
    with torch.no_grad():
        weights_close({key: found[key] for key in bnn.weights}, bnn.posterior.mean())
        expected = call(bnn.draw(1)[0].__class__(bnn.draw(1).runner, bnn.posterior.mean(), torch.zeros(())), inputs)
        close(call(plain, inputs), expected)
    assert plain.training == case.training
    own = {id(parameter) for parameter in bnn.parameters()}
    assert not own & {id(parameter) for parameter in plain.parameters()}


@some_pairs
def test_the_original_is_not_changed(name: str, case: Case) -> None:
    from cases import posterior

    import bayesify

    net = case.network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    identities = {key: id(value) for key, value in net.named_parameters(remove_duplicate=False)}
    choice: Any = posterior(name, case)
    bnn = bayesify.bayesianize(net, choice if case.selector is None else {case.selector: choice})
    call(bnn, case.batch())
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(1.0)
    assert {key: id(value) for key, value in net.named_parameters(remove_duplicate=False)} == identities
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert choice.layers == ()
    assert not list(choice.parameters()), "the posterior that was passed in must not be changed"


@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name in REFUSED for leaf in sorted(REFUSED[name])])
def test_a_refusal_says_why_and_what_to_do(name: str, leaf: str) -> None:
    with pytest.raises(ValueError, match=r"\w+: .+; .+"):
        convert(name, CASES[leaf])


@every_leaf
def test_a_network_without_its_posterior_fails(case: Case) -> None:
    """Normalization without scale and shift is a function of its own, so their slots alone cannot fail."""
    bnn = convert("point", case)
    assert all(
        network_slot(bnn, name) is None for weight in bnn.weights.values() for name in (weight.name, *weight.aliases)
    )
    if all(weight.kind == "norm" for weight in bnn.weights.values()):
        return
    with pytest.raises((TypeError, RuntimeError, AttributeError, AssertionError)), torch.no_grad():
        call(bnn.network, case.batch())


def network_slot(bnn: BayesianNetwork, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return bnn.network.get_submodule(path)._parameters[leaf]


def compiled_equals_eager(name: str, case: Case, backend: str = "inductor") -> None:
    """Draw outside, compile the forward pass given the draw."""
    bnn, inputs = convert(name, case), case.batch()
    with torch.no_grad():
        weights = {key: value[0] for key, value in bnn.draw(1, generator=generator()).materialize().weights.items()}

    def forward(weights: dict[str, torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(bnn.network, weights, args)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(forward, fullgraph=True, backend=backend)(weights, *inputs)
        close(compiled, forward(weights, *inputs))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compile() -> None:
    """One graph without breaks; machine code, which takes up to a minute to make, is the slow test's."""
    compiled_equals_eager("mean_field", CASES["linear"], backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@over(["linear", "conv2d", "transposed2d", "embedding", "batch_norm", "attention", "encoder"])
def test_compile_more(name: str, case: Case) -> None:
    compiled_equals_eager(name, case)


def test_torch_save_of_the_state() -> None:
    bnn = convert("mean_field", CASES["lstm"])
    buffer = io.BytesIO()
    torch.save(bnn.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded.keys() == bnn.state_dict().keys()
    assert isinstance(bnn, nn.Module)
