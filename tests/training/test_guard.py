"""A step whose gradients are not finite changes nothing: parameters, buffers, optimizer, scheduler and checkpoint."""

import copy
import math

import pytest
import torch
from runs import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, deep_gp, likelihoods, posteriors
from bayesify.running import progress
from bayesify.training import Checkpointing, ModelStack, StackedBatch, Steps
from bayesify.training.checkpoints import Checkpoint

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0)) + 0.1
Y = X.sum(1, keepdim=True)
SIZE = 8


class Root(nn.Module):
    """Finite outputs whose gradient is NaN at an input of zeros."""

    def __init__(self, norm=True):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.cat([self.norm(h), h.square().sum(-1, keepdim=True).sqrt()], -1))


def network(posterior=None, norm=True):
    torch.manual_seed(1)
    return bayesify.bayesianize(
        Root(norm), posterior or posteriors.MeanField(init_std=0.05), likelihood=likelihoods.Gaussian(0.1)
    )


def batches(bad=None, x=X):
    """Batches of 8, all zeros in one row of the given batch (from 0)."""
    x = x.clone()
    if bad is not None:
        x[bad * SIZE + 3] = 0
    return DataLoader(TensorDataset(x, Y), batch_size=SIZE)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Watched:
    """An optimizer and a scheduler that can be looked at afterwards."""

    def __init__(self, make):
        self.make = make

    def __call__(self, parameters):
        self.optimizer = self.make(parameters)
        return self.optimizer

    def scheduler(self, optimizer):
        self.made = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return self.made


def state_of(bnn, watched):
    return copy.deepcopy((bnn.state_dict(), watched.optimizer.state_dict(), watched.made.state_dict()))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.thin(3)
@pytest.mark.parametrize("make", [sgd, adam, None])
@pytest.mark.parametrize("steps", [Steps(scheduler="step"), Steps(2, 1.0, "step"), Steps(4), Steps(clip_norm=0.1)])
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_the_step_changes_nothing(tmp_path, bad, steps, make):
    """First, middle and last batch; the state is that of a run over the steps before it, bit for bit."""
    make = make or (lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True))
    path = tmp_path / "run.safetensors"
    bnn, watched, whole = refused(bad, steps, make, Checkpointing(path, 1))
    assert not bnn.training
    if whole == 0:
        assert equal(dict(bnn.state_dict()), dict(network().state_dict()))
        assert not watched.optimizer.state
        assert not path.exists()
        return
    state = state_of(bnn, watched)[0]
    as_after(whole, steps, bnn, watched)
    stored = Checkpoint.read(path)
    assert stored.position["batches"] == whole
    assert equal({name: stored.model[name] for name in state}, dict(state))


def refused(bad, steps, make, checkpoint, **options):
    """A run over a bad batch, what trained it, and the batches of the steps before that one."""
    bnn, watched = network().eval(), Watched(make)
    options |= {"optimizer": watched, "scheduler": watched.scheduler, "checkpoint": checkpoint, "steps": steps}
    with pytest.raises(ValueError, match=rf"epoch 1, batch {bad + 1}: the gradient of .*first/weight.* is not finite"):
        bayesify.fit(bnn, batches(bad), epochs=1, seed=0, progress=False, num_data=48, **options)
    return bnn, watched, bad // steps.accumulate * steps.accumulate


def as_after(whole, steps, bnn, watched, **options):
    """Network, optimizer and scheduler are as after a run over so many batches, bit for bit; what trained that run."""
    other, beside = network(), Watched(watched.make)
    before = [batch for index, batch in enumerate(batches()) if index < whole]
    options |= {"epochs": 1, "seed": 0, "progress": False, "num_data": 48, "steps": steps, "optimizer": beside}
    if steps.scheduler == "epoch":  # the epoch of the shorter run ends, which the scheduler sees
        bayesify.fit(other, before, **options)
        beside.scheduler(beside.optimizer)
    else:
        bayesify.fit(other, before, scheduler=beside.scheduler, **options)
    first, second = state_of(bnn, watched), state_of(other, beside)
    assert equal(dict(first[0]), dict(second[0]))  # running statistics of batch norm too
    assert equal(first[1]["state"], second[1]["state"])
    assert first[2]["last_epoch"] == second[2]["last_epoch"]
    return beside


def test_mended_data_continue_from_the_checkpoint(tmp_path):
    path, whole, bnn = tmp_path / "run.safetensors", network(), network()
    options = {"epochs": 2, "seed": 0, "progress": False}
    bayesify.fit(whole, batches(), **options)
    with pytest.raises(ValueError, match="epoch 1, batch 4"):
        bayesify.fit(bnn, batches(3), checkpoint=Checkpointing(path, 1), **options)
    bayesify.fit(bnn, batches(), checkpoint=Checkpointing(path, 1), **options)
    assert same(bnn, whole)


def test_an_infinite_gradient_and_one_whose_square_overflows():
    """The second would make an infinite state of Adam, which stops the parameter for good."""
    for value in (float("inf"), 1e25):
        bnn = network(norm=False)
        target = next(parameter for name, parameter in bnn.named_parameters() if "last" in name)
        target.register_hook(lambda grad, value=value: grad * 0 + value)
        before = copy.deepcopy(bnn)
        for clip in (None, 1.0):
            with pytest.raises(ValueError, match=r"epoch 1, batch 1: the gradient of .*last/weight is not finite"):
                bayesify.fit(bnn, batches(), epochs=1, steps=Steps(clip_norm=clip), progress=False)
            assert same(bnn, before)


def test_parameters_that_overflow_are_not_stored(tmp_path):
    """Finite gradients and a rate that makes the step infinite: an error, and no file."""
    path, bnn = tmp_path / "run.safetensors", network(norm=False)
    huge = lambda parameters: torch.optim.SGD(parameters, lr=3e38)  # noqa: E731
    with pytest.raises(ValueError, match=r"epoch 1: a step made .* infinite or NaN although its gradients were finite"):
        bayesify.fit(bnn, [(X, 100 * Y)], epochs=1, optimizer=huge, progress=False, checkpoint=path)
    assert not path.exists()


def trainers(x):
    loader = batches(x=x)
    yield "SWAG", baselines.SWAG(Root(), likelihoods.Gaussian(0.1)), lambda swag: swag.fit(loader, 2, progress=False)
    yield "VOGN", baselines.VOGN(network()), lambda made: made.fit(loader, 2, progress=False)
    yield "IVON", baselines.IVON(network()), lambda made: made.fit(loader, 2, progress=False)
    kfac = baselines.NoisyKFAC(network(posteriors.MatrixNormal()), inverse_every=2)
    yield "NoisyKFAC", kfac, lambda made: made.fit(loader, 2, progress=False)
    yield (
        "fit_members",
        network(posteriors.Ensemble(2)),
        lambda bnn: baselines.fit_members(bnn, loader, 2, progress=False),
    )


def all_state(model):
    """Everything that a trainer holds, as tensors and numbers."""
    found = {}
    for name, value in vars(model).items():
        if isinstance(value, nn.Module):
            found[name] = dict(value.state_dict())
        elif isinstance(value, torch.optim.Optimizer):
            found[name] = value.state_dict()
        elif isinstance(value, (dict, int, float)) and not name.startswith("__") and name not in ("weights", "_rules"):
            found[name] = value
    return copy.deepcopy(found | {"own": dict(model.state_dict())} if isinstance(model, nn.Module) else found)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("bad", [0, 5])
def test_every_trainer_is_guarded(place, bad):
    x = X.clone()
    x[bad * SIZE + 3] = 0
    torch.manual_seed(0)
    name, model, train = list(trainers(x))[place]
    before = all_state(model)
    with pytest.raises(ValueError, match=f"epoch 1, batch {bad + 1}: .*not finite"):
        train(model)
    after = all_state(model)
    assert all(torch.isfinite(value).all() for value in _tensors(after)), name
    if bad == 0:
        for key in ("network", "likelihood", "bnn", "own", "moments", "steps", "count"):
            assert equal(before.get(key), after.get(key)), key


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)


def test_a_factorization_that_fails_changes_nothing(monkeypatch):
    from bayesify.baselines import noisy_kfac

    trainer = baselines.NoisyKFAC(network(posteriors.MatrixNormal(), norm=False), num_data=48)
    trainer.step(X, Y, generator=torch.Generator().manual_seed(0))
    before = all_state(trainer)

    def fail(*_):
        raise torch.linalg.LinAlgError("not positive definite")

    calls = []
    root = noisy_kfac.damped_roots
    monkeypatch.setattr(
        noisy_kfac, "damped_roots", lambda *a: calls.append(1) or (root(*a) if len(calls) < 2 else fail())
    )
    with pytest.raises(RuntimeError, match="not positive definite"):
        trainer.step(X, Y, generator=torch.Generator().manual_seed(1))
    assert equal(before, all_state(trainer))


def test_deep_gaussian_processes_are_guarded():
    gp = deep_gp.DeepGP(X, Y, depth=2, num_inducing=5)
    name, parameter = next(iter(gp.named_parameters()))
    parameter.register_hook(lambda grad: grad * float("nan"))
    before = copy.deepcopy(gp.state_dict())
    with pytest.raises(ValueError, match=f"epoch 1, batch 1: the gradient of {name} is not finite"):
        gp.fit((X, Y), epochs=1, progress=False)
    assert equal(dict(before), dict(gp.state_dict()))


class Unlucky:
    """Batches, and then an error."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 6

    def __iter__(self):
        for index, batch in enumerate(batches()):
            if index == 2:
                raise self.error
            yield batch


class Own(Exception):
    pass


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyError, MemoryError, IndexError, Own, ValueError, EOFError])
def test_errors_of_a_loader_say_where(error):
    bnn = network()
    with pytest.raises(error, match=r"epoch 1, batch 3: .*disk.*steps taken before this error: 2"):
        bayesify.fit(bnn, Unlucky(error("disk")), epochs=1, num_data=48, progress=False)


class Assigns(nn.Module):
    """Assigns its buffer instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.layer(x)


def test_buffers_that_are_assigned_are_set_back():
    bnn = bayesify.bayesianize(Assigns(), posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1))
    states = []

    class Loader:
        def __iter__(self):
            for scale in (1.0, 1.0, 1e30):
                states.append(copy.deepcopy(bnn))
                yield X, Y * scale

    with pytest.raises(ValueError, match="batch 3"):
        bayesify.fit(bnn, Loader(), epochs=1, num_data=144, seed=0, progress=False)
    assert same(bnn, states[2])


def test_parameters_that_the_optimizer_does_not_have_do_not_count():
    """Their gradients neither add up from step to step nor enter the norm by which the others are clipped."""

    def trained(frozen):
        bnn = network()
        noise = bnn.likelihood.raw_noise.requires_grad_(not frozen)
        rest = [value for value in bnn.parameters() if value is not noise]
        steps = Steps(clip_norm=0.05)
        optimizer = torch.optim.SGD(rest, lr=0.1)
        bayesify.fit(bnn, batches(), epochs=2, optimizer=optimizer, steps=steps, seed=0, progress=False)
        return bnn

    assert same(trained(False), trained(True))


class Response(Exception):
    """An error that takes something else than a message."""

    def __init__(self, response):
        super().__init__(f"status {response.status}")


def test_an_error_whose_class_takes_no_message_stays_what_it_is():
    class Loader:
        status = 5

        def __iter__(self):
            yield X[:8], Y[:8]
            raise Response(self)

    with pytest.raises(Response, match="status 5"):
        bayesify.fit(network(), Loader(), epochs=1, num_data=16, seed=0, progress=False)


def test_errors_that_take_more_than_a_message_carry_a_note():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")
    with pytest.raises(UnicodeDecodeError) as caught:
        bayesify.fit(network(), Unlucky(error), epochs=1, num_data=48, progress=False)
    assert "epoch 1, batch 3" in caught.value.__notes__[0]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scheduler_that_raises_after_a_step_leaves_the_step_whole(norm, accumulate):
    """The step counts as taken: parameters, momentum and batch statistics are those of a run that ended there."""

    class Failing(torch.optim.lr_scheduler.ConstantLR):
        def step(self):
            if self.last_epoch == 1 and self.fails:
                raise OSError("the schedule is in a file that is gone")
            super().step()

    def run(fails, data):
        bnn, kept = network(norm=norm), []

        def schedule(optimizer):
            kept.append(optimizer)
            Failing.fails = False
            made = Failing(optimizer, factor=1.0)
            Failing.fails = fails
            return made

        options = {"optimizer": sgd, "scheduler": schedule, "num_data": 48, "seed": 0, "progress": False}
        steps = Steps(accumulate=accumulate, scheduler="step")
        if fails:
            with pytest.raises(
                OSError, match=rf"epoch 1, batch {2 * accumulate}: the schedule is .* before this error: 2"
            ):
                bayesify.fit(bnn, data, epochs=1, steps=steps, **options)
        else:
            bayesify.fit(bnn, data, epochs=1, steps=steps, **options)
        return bnn, kept[0]

    (broken, theirs), (whole, ours) = run(True, batches()), run(False, list(batches())[: 2 * accumulate])
    assert same(broken, whole)
    for a, b in zip(theirs.state.values(), ours.state.values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


BAD = (0, 4)


def own_batches():
    """Six batches of two models; in some of them the second has a row of zeros."""
    rows = torch.stack([X, X.flip(0)]).view(2, 6, SIZE, 3).clone()
    targets = rows.sum(-1, keepdim=True)
    rows[1, BAD, 0] = 0.0
    return [StackedBatch(rows[:, step], targets[:, step]) for step in range(6)]


def skipping(model, batches, *, accumulate=1, **options):
    """SGD with momentum, of which a step that is skipped leaves no trace."""
    return bayesify.fit(
        model,
        batches,
        epochs=2,
        num_data=48,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        steps=Steps(accumulate=accumulate, clip_norm=50.0, skip_not_finite=True),
        seed=0,
        progress=False,
        **options,
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_of_a_stack_skips_steps_alone(norm, accumulate):
    """The first model trains as if alone, the second as if the steps had not been, statistics of batches included."""
    models = [network(posteriors.Point(), norm=norm) for _ in range(2)]
    alone = copy.deepcopy(models)
    batches = own_batches()
    stack = ModelStack(models)
    history = skipping(stack, batches, accumulate=accumulate)
    stack.unstack()
    windows = [range(start, start + accumulate) for start in range(0, 6, accumulate)]
    bad = [window for window in windows if set(window) & set(BAD)]
    assert [row["skipped_steps"] for row in history] == [[0, len(bad)]] * 2
    good = [batches[step].model(1) for window in windows if window not in bad for step in window]
    expected = [
        skipping(alone[0], [batch.model(0) for batch in batches], accumulate=accumulate),
        skipping(alone[1], good, accumulate=accumulate),
    ]
    for key in ("nll", "elbo"):
        for index, own in enumerate(expected):
            assert [row[f"{key}_by_model"][index] for row in history] == pytest.approx(own.column(key), rel=1e-5)
    for trained, other in zip(models, alone, strict=True):
        torch.testing.assert_close(trained.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_a_single_model_skips_steps_and_goes_on_after_an_interruption(tmp_path, norm):
    batches = [batch.model(1) for batch in own_batches()]
    whole, stopped, good = (network(posteriors.Point(), norm=norm) for _ in range(3))
    history = skipping(whole, batches)
    assert history.column("skipped_steps") == [2, 2]
    skipping(good, [batch for step, batch in enumerate(batches) if step not in BAD])
    torch.testing.assert_close(whole.state_dict(), good.state_dict(), rtol=1e-5, atol=1e-6)
    path = tmp_path / "run.safetensors"

    def broken():
        yield from batches[:5]
        raise OSError("unplugged")

    class Loader:
        def __len__(self):
            return 6

        def __iter__(self):
            return broken()

    with pytest.raises(OSError, match="unplugged"):
        skipping(stopped, Loader(), checkpoint=Checkpointing(path, every=1))
    resumed = skipping(stopped, batches, checkpoint=path)
    assert resumed.column("skipped_steps") == [2, 2]
    assert resumed.column("nll") == history.column("nll")
    assert same(stopped, whole)


def test_skipped_steps_leave_what_callbacks_do_to_buffers():
    """The epoch's last step is skipped; buffers that change after it are those that the next epoch begins with."""
    bnn, found = network(posteriors.Point()), []

    def reset(model, history):
        found.append(int(model.network.norm.num_batches_tracked))
        model.network.norm.num_batches_tracked.zero_()

    skipping(bnn, batches(bad=5), callbacks=[reset])
    assert found == [5, 5]


def test_losses_of_skipped_steps_weigh_by_examples():
    """Batches of 20, 20 and 8, of which the last is skipped: the losses of the other two."""
    parts = list(zip(X.clone().split([20, 20, 8]), Y.split([20, 20, 8]), strict=True))
    parts[-1][0][0] = 0.0
    history, known = (skipping(network(posteriors.Point(), norm=False), some) for some in (parts, parts[:2]))
    for key in ("nll", "kl", "elbo"):
        assert history.column(key) == pytest.approx(known.column(key), rel=1e-12)


def test_an_epoch_without_a_step_has_no_losses(tmp_path):
    """All steps of the second model are skipped: it is the last of the two, and alone its losses are NaN."""
    models = [network(posteriors.Point(), norm=False) for _ in range(2)]
    own = own_batches()
    for batch in own:
        batch.x[1, 0] = 0.0
    alone = skipping(
        copy.deepcopy(models[1]), [batch.model(1) for batch in own], checkpoint=tmp_path / "run.safetensors"
    )
    assert alone.column("skipped_steps") == [6, 6]
    assert all(math.isnan(row[key]) for row in alone for key in ("nll", "kl", "elbo"))
    for row in skipping(ModelStack(models), own):
        assert row["skipped_steps"] == [0, 6]
        assert row["elbo_by_model"] == [row["elbo"], -math.inf]
        assert row["nll_by_model"] == [row["nll"], math.inf]
        assert math.isfinite(row["kl"])


def test_progress_of_an_epoch_whose_first_step_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    bnn = network(posteriors.Point(), norm=False)
    bayesify.fit(bnn, batches(bad=0), epochs=1, seed=0, steps=Steps(skip_not_finite=True), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert "NLL nan" in lines[0]
    assert "NLL nan" not in lines[1]


class Words(nn.Module):
    """Finite outputs whose gradient is NaN for texts of the word 0 alone."""

    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=sparse)
        nn.init.zeros_(self.words.weight[0])
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.words(x).mean(1).square().sum(-1, keepdim=True).sqrt())


def test_sparse_gradients_are_skipped_as_dense_ones():
    texts = torch.randint(1, 5, (24, 2), generator=torch.Generator().manual_seed(0))
    texts[8:16] = 0
    states = []
    for sparse in (True, False):
        torch.manual_seed(1)
        bnn = bayesify.bayesianize(Words(sparse), {"last": posteriors.Point()}, likelihood=likelihoods.Gaussian(0.1))
        history = bayesify.fit(
            bnn,
            list(zip(texts.split(8), Y[:24].split(8), strict=True)),
            epochs=2,
            optimizer=sgd,
            steps=Steps(skip_not_finite=True),
            seed=0,
            progress=False,
        )
        assert history.column("skipped_steps") == [1, 1]
        states.append(bnn.state_dict())
    torch.testing.assert_close(*states)


def test_a_network_with_a_sparse_buffer_trains():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.register_buffer("adjacency", torch.eye(24).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.adjacency, self.layer(x))

    bnn = bayesify.bayesianize(Graph(), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    x = torch.randn(24, 2)
    history = bayesify.fit(bnn, [(x, x[:, :1])], epochs=3, progress=False, steps=Steps(skip_not_finite=True))
    assert math.isfinite(history.column("elbo")[-1])
