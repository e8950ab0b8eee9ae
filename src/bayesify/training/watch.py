"""Observation of a run of `fit` for its findings. Observing is cheap and does not affect the run's numbers."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictive.findings import Finding, Findings, joined
from bayesify.predictor import Batch, Drawable, Phase, Predictor, Trainable
from bayesify.running.generators import own_generators
from bayesify.training import rules
from bayesify.training.arguments import Settings
from bayesify.training.batch_statistics import following_layers
from bayesify.training.history import History
from bayesify.training.rules import Score
from bayesify.training.validation import Totals, predict_plain, validated
from bayesify.weights.catalog import put_in

MAX_WINDOWS = 96
"""Maximum number of windows of steps in which the objective is recorded. Then neighboring windows are merged in pairs."""
MIN_WATCHED_STEPS = 10
"""In runs with fewer steps than this, only the objective is watched."""
MAX_SCORED_EXAMPLES = 512
"""Number of examples that are predicted before and after training. Whole batches are used, and at least one."""
MAX_SCORING_SHARE = 0.005
"""Scoring one draw may cost at most this share of the run's forward and backward passes. At least one batch is always scored."""
SCORING_DRAWS = 4
"""Number of draws of the prediction at the end, in evaluation mode. Together with `MAX_SCORED_EXAMPLES` this limits the
prediction to 2,048 passes of single examples, or 2 % of the passes of training. At least one batch is always
predicted."""


NOT_COMPARED = (
    "predictions were compared with those of the given network on training batches only, which cannot show a rise of "
    "the NLL below 0.25 nats per example; give validation= to compare on held-out data"
)


class Trace:
    """Running sums of the objective's terms, recorded at the end of each window of consecutive steps; all windows are equally
    long. The sums stay on the device and are read once at the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[Tensor, int]] = []  # since the first step: sums as in `Sums`, and number of examples
        self._every, self._steps, self._examples = 1, 0, 0
        self._earlier: Tensor | None = None  # sums of earlier epochs

    def step(self, sums: Tensor, examples: int) -> None:
        """Record a step, given the sums of the epoch so far and the number of examples in the step."""
        self._steps += 1
        self._examples += examples
        if self._steps % self._every:
            return
        self.marks.append((self._total(sums), self._examples))
        if len(self.marks) == MAX_WINDOWS:
            self.marks = self.marks[1::2]
            self._every *= 2

    def close_epoch(self, sums: Tensor) -> None:
        """End an epoch, after which the sums start at 0 again."""
        self._earlier = self._total(sums)

    def _total(self, sums: Tensor) -> Tensor:
        return sums.clone() if self._earlier is None else self._earlier + sums

    def read(self) -> tuple[list[float], list[float]]:
        """NLL per example and KL, both averaged over models, of each window with a step. Reading them waits for the device."""
        if not self.marks:
            return [], []
        totals = torch.stack([total for total, _ in self.marks]).double().cpu()  # [W, 4] or [W, 4, R]
        sums = totals.diff(dim=0, prepend=torch.zeros_like(totals[:1]))
        examples = torch.tensor([0, *(count for _, count in self.marks)]).diff()
        nll, kl, _, steps = sums.view(len(sums), 4, -1).unbind(1)  # [W, R], R = 1 for one model
        counts = examples[:, None] * steps / self._every
        found = torch.stack([nll / counts, kl / steps]).nanmean(2)
        losses, penalties = found[:, ~found.isnan().any(0)].tolist()
        return losses, penalties

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "marks": [[total.tolist(), count] for total, count in self.marks],
            "present": [self._every, self._steps, self._examples],
            "earlier": None if self._earlier is None else self._earlier.tolist(),
        }

    def load(self, state: dict[str, Any], like: Tensor) -> None:
        """Inverse of `state`."""

        def tensor(values: Any) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=like.device)

        self.marks = [(tensor(total), int(count)) for total, count in state["marks"]]
        self._every, self._steps, self._examples = (int(value) for value in state["present"])
        self._earlier = None if state["earlier"] is None else tensor(state["earlier"])
        if len({total.shape for total, _ in self.marks}) > 1 or self._every < 1:
            raise ValueError("the stored values of the objective have different shapes, so the checkpoint is damaged")


class Watch:
    """Observes one run of `fit`: the course of the objective, the starting network, and the spread of the weights.

    The watch does not change the run's results, consume its random numbers or delay its steps. An error during observation does
    not end the run. If several processes train together, only the first process observes.
    """

    def __init__(self, model: Trainable, settings: Settings, batches: int | None, device: torch.device) -> None:
        self.model, self.settings, self.device = model, settings, device
        self._bnn = model.module if isinstance(model.module, BayesianNetwork) else None
        self.trace, self.phase = Trace(), ""
        self.start: Score | None = None
        self.spread: dict[str, float] = {}
        self._widths: dict[str, float] = {}  # initial standard deviations; unknown in a continued run
        self.first: list[Finding] = []
        self.new_rows_ratio = 1.0  # mean squared error on new rows, divided by that on training rows
        steps = (batches or MIN_WATCHED_STEPS) * settings.total_epochs / settings.steps.accumulate
        self._looks = steps >= MIN_WATCHED_STEPS
        self._allowed = min(MAX_SCORED_EXAMPLES, MAX_SCORING_SHARE * 3 * settings.total_epochs * settings.num_data)
        self._network: nn.Module | None = None  # the given network, while it is scored on training batches
        self._totals = Totals()  # its scores
        self._first: list[Batch] = []  # batches on which it was scored
        self._last: list[Batch] = []
        self._validated: Score | None = None  # score of the epoch whose model the run returns

    # -- while it runs ---------------------------------------------------------------------------------------------

    def begin(self, score: Callable[[Callable[[Any], Predictive]], Score] | None = None) -> None:
        """Begin a new run. `score` takes a prediction function and returns the validation scores of its predictions."""
        network: nn.Module | None = None
        if self._looks:
            with self._aside():
                self._widths, self.spread = weight_spread(self.model, self.device)
            with self._aside():
                network = start_network(self.model)
        if self._bnn is not None:
            self._bnn.given_weights = {}
        if score is None or network is None:
            self._network = network
            return
        with self._aside():
            self.start = score(partial(self._predict_start, network))
            self._tell_if_elsewhere(self.start)

    def before_step(self, phase: Phase, batches: Sequence[Batch], last_epoch: bool) -> None:
        """Look at the batches of a step before the step is taken."""
        if phase != self.phase:
            self.trace, self.phase = Trace(), phase
        for batch in batches:
            network, self._network = self._network, None  # the scoring ends with enough examples or with an error
            if network is None or self._too_many(self._totals.total, batch):
                break
            with self._aside():
                moved = batch.to(self.device)
                self._totals.add(self._predict_start(network, moved.x), moved)
                if not self._first:
                    self._tell_if_elsewhere(self._totals.score())
                self._first.append(batch)
                self._network = network
        if last_epoch and self._looks:
            for batch in batches:
                if not self._too_many(sum(map(len, self._last)), batch):
                    self._last.append(batch)

    def _too_many(self, count: float, batch: Batch) -> bool:
        return count > 0 and count + len(batch) > self._allowed

    def _close_start(self) -> None:
        if self.start is None and self._totals.total > 0:
            self.start = self._totals.score()
        self._network = None

    def _predict_start(self, network: nn.Module, x: Any) -> Predictive:
        bnn = self._bnn
        assert bnn is not None
        assert bnn.likelihood is not None
        prediction = predict_plain(network, x, bnn.likelihood, bnn.output)
        if not self.first:
            self._tell(rules.probabilities_as_logits(bnn.likelihood, prediction.outputs[0]))
        return prediction

    def _tell(self, found: list[Finding]) -> None:
        """Warn of findings that are known before training. The findings are reported again at the end of training."""
        self.first = self.first + found
        for finding in found:
            warnings.warn(f"fit: {finding}", stacklevel=2)

    def _tell_if_elsewhere(self, given: Score) -> None:
        self._tell(rules.starts_elsewhere(given, self._bnn.posteriors if self._bnn is not None else ()))

    def after_validation(self, totals: Totals) -> None:
        """Store the validation scores: the best scores if the run returns the best epoch, otherwise the last scores."""
        best = self._validated.nll if self._validated is not None and self.settings.patience else math.inf
        if totals.means()["nll"] < best or not self.settings.patience:
            self._validated = totals.score()

    def close_epoch(self, sums: Tensor) -> None:
        """End an epoch."""
        self.trace.close_epoch(sums)
        self._close_start()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context without gradients and with separate random numbers. Errors inside this context are ignored."""
        try:
            with torch.no_grad(), own_generators([self.device]):
                yield
        except Exception:
            return

    # -- at the end -----------------------------------------------------------------------------------------------

    def _moving(self, values: list[float]) -> list[float]:
        """The part of a series of losses in which the network is still changing. If the learning rate falls to 0, this is the
        first two thirds of the series, because at the end every run looks converged."""
        return values[: -(-2 * len(values) // 3)] if self.settings.falling_rate else values

    @property
    def _unit_nats(self) -> float:
        return self.start.unit_nats if self.start is not None else 0.0

    def findings(self, history: History, kl_weight: float, stopped: bool, autocast: Any = None) -> Findings:
        """All findings of the run."""
        self._close_start()
        nll, kl = self.trace.read()
        penalty = [kl_weight * value / self.settings.num_data for value in kl]
        parts: list[list[Finding]] = [self.first]
        held_out = [row["validation_nll"] for row in history if "validation_nll" in row]
        # Score the rows on which the given network was scored, because this reduces noise. A continued run has other
        # rows.
        self._last = self._first or self._last
        now: Score | None = None
        with self._aside(), autocast or nullcontext():
            now = score_batches(self.model, self._last, self.device, self.new_rows_ratio) if self._last else None
        pulled = rules.kl_dwarfs(nll, penalty[-1], self.start, None if held_out else now) if nll else []
        parts.append(pulled)
        if not pulled and not stopped and not _settled(self._moving(held_out)):
            bound = [data + term for data, term in zip(nll, penalty, strict=True)]
            parts.append(rules.convergence(self._moving(nll), self._moving(bound), self._unit_nats))
        # Larger spreads have either moved already or were never small.
        if 0 < max(self.spread.values(), default=0.0) < math.e * rules.MIN_RELATIVE_SPREAD:
            with self._aside():
                parts.append(rules.scales_still(self.spread, weight_spread(self.model, self.device)[1]))
        rows = history[-1].get("nll_by_model") if history else None
        if rows is not None:
            parts.append(rules.members_apart(rows, "models of the stack", self._unit_nats))
        with self._aside(), autocast or nullcontext():
            parts += self._predictions(nll, bool(held_out), now)
        self._first, self._last = [], []
        if {finding.code for part in parts for finding in part} & {"kl_dwarfs", "worse_than_start"}:
            with self._aside():
                parts.append(rules.scales_wide(self._widths, *weight_spread(self.model, self.device)))
        found = joined(parts)
        if "worse_than_start" not in found.codes:  # the different start did no harm
            found = Findings(finding for finding in found if finding.code != "starts_elsewhere")
        if not self._looks:
            return Findings(
                found, f" in a run of fewer than {MIN_WATCHED_STEPS} steps, which is too short for most checks"
            )
        if held_out or self.start is None:
            return found
        history.notes["comparison"] = NOT_COMPARED
        return Findings(found, " on training batches; give validation= to compare with the given network on other data")

    def _predictions(self, nll: list[float], held_out: bool, now: Score | None) -> list[list[Finding]]:
        """Findings about predictions. `now` is the score of the last batches in evaluation mode, as in `predict`."""
        found, bnn = [], self._bnn
        recent = fmean(nll[-max(1, len(nll) // 8) :]) if nll else 0.0
        if held_out and self.start is not None and self._validated is not None:
            best = self._validated
            found += [rules.worse_than_start(self.start, best, held_out=True), rules.coverage_off(best, held_out=True)]
            found.append(rules.less_calibrated(self.start, best))
        elif not held_out and self.start is not None and now is not None:
            found += [rules.worse_than_start(self.start, now, held_out=False), rules.coverage_off(now, held_out=False)]
            weighted = any(batch.weights is not None for batch in self._last)  # training averages over examples
            if bnn is not None and bnn.kept_statistics is None and following_layers(bnn) and not weighted:
                found.append(rules.statistics_differ(recent, now))
        members = member_nll(bnn, self._last, self.device) if self._last and bnn is not None else []
        if members:
            found.append(rules.members_apart(members, unit_nats=self._unit_nats))
        if bnn is not None:
            found.append(rules.labels_as_numbers(bnn.likelihood, (batch.y for batch in self._last)))
        if now is not None:
            found.append(rules.learned_little(now))
        return found

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        score = self._totals.score() if self.start is None and self._totals.total > 0 else self.start
        return {
            "trace": self.trace.state(),
            "phase": self.phase,
            "start": None if score is None else score.config(),
            "validated": None if self._validated is None else self._validated.config(),
            "spread": self.spread,
            "first": [list(astuple(finding)) for finding in self.first],
        }

    def load(self, state: dict[str, Any], like: Tensor) -> None:
        """Inverse of `state`."""
        self.trace.load(state["trace"], like)
        self.phase = str(state["phase"])
        scores = (state["start"], state["validated"])
        self.start, self._validated = (None if score is None else Score.restore(score) for score in scores)
        self.spread = {str(name): float(value) for name, value in state["spread"].items()}
        self.first = [Finding(str(code), str(sentence), str(remedy)) for code, sentence, remedy in state["first"]]


def _settled(held_out: list[float]) -> bool:
    """Whether the held-out NLL no longer falls in the last third of the epochs. In this case, more epochs would not help."""
    last = held_out[-max(2, len(held_out) // 3 + 1) :]
    return len(last) > 1 and last[-1] > last[0] - rules.MIN_GAIN_NATS


def start_network(model: Trainable) -> nn.Module | None:
    """The network to compare with: the one that was made Bayesian, or the mean of a posterior that was trained before."""
    bnn = model.module
    if not isinstance(bnn, BayesianNetwork) or bnn.likelihood is None:
        return None
    if not bnn.given_weights or all(part.starts_at_network for part in bnn.posteriors):
        return bnn.mean_network().eval()
    network = copy.deepcopy(bnn.network).eval()
    put_in(network, list(bnn.weights.values()), bnn.given_weights)
    return network


@torch.no_grad()
def weight_spread(model: Predictor | Trainable, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    r"""Spread $\sqrt{\mathbb{E}(w - w')^2 / 2}$ of each weight over draws w and w', and this spread relative to the weight's root
    mean square."""
    parts = (model, model.module) if isinstance(model, Trainable) else (model,)
    drawable = next((part for part in parts if isinstance(part, Drawable)), None)
    if drawable is None:
        return {}, {}
    draws = drawable.draw(2, generator=torch.Generator(device).manual_seed(0)).materialize()
    size = {name: weight.float().square().mean() for name, weight in draws.weights.items()}
    apart = {name: (weight[0] - weight[1]).float().square().mean() / 2 for name, weight in draws.weights.items()}
    ratios = [apart[name] / size[name].clamp_min(1e-30) for name in size]
    widths, relative = torch.stack([*apart.values(), *ratios]).sqrt().view(2, -1).tolist()
    return dict(zip(size, widths, strict=True)), dict(zip(size, relative, strict=True))


def score_batches(model: Trainable, batches: Sequence[Batch], device: torch.device, ratio: float = 1.0) -> Score:
    """Score of a model's predictions on some training batches; see `Totals` for `ratio`."""
    predictor, totals = validated(model), Totals(seen=True, ratio=ratio)
    for batch in batches:
        part = batch.to(device)
        generator = torch.Generator(device).manual_seed(0)
        totals.add(predictor.predict(part.x, SCORING_DRAWS, generator=generator), part)
    return totals.score()


def member_nll(bnn: BayesianNetwork, batches: Sequence[Batch], device: torch.device) -> list[float]:
    """NLL per example of each distinct draw; empty if the posterior has only one distinct draw, or infinitely many."""
    count, likelihood = bnn.num_distinct_draws, bnn.likelihood
    if count is None or count < 2 or likelihood is None:
        return []
    total, examples = torch.zeros(count, dtype=torch.float64), 0
    for batch in batches:
        part = batch.to(device)
        generator = torch.Generator(device).manual_seed(0)  # members have the same order in each batch
        outputs = bnn.predict(part.x, count, generator=generator, keep_outputs=True).outputs
        total -= likelihood.log_prob(outputs, part.y, has_draws=True).double().sum(1).cpu()
        examples += len(batch)
    return (total / max(1, examples)).tolist()
