"""Text generation with draws of a language model, all in one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, NonNegative, checked
from bayesify.predictor import Drawable
from bayesify.running.row_draws import as_rows


@dataclass(frozen=True)
class Generation:
    """Text that draws have generated.

    Args:
        tokens: Prompt and continuation: [B, T], or [S, B, T] if each draw writes its own text.
        log_probs: Log-probability of each new token given the previous tokens: [..., new]; 0 after the end of a text. The sum is
            the log-probability of the continuation, equal to `predict(...).log_prob(...)` of its tokens.
        mutual_information: Disagreement of the draws at each new token, in nats: [B, new]; 0 if each draw writes its own text.
    """

    tokens: Tensor
    log_probs: Tensor
    mutual_information: Tensor


@torch.no_grad()
@checked
def generate(
    predictor: Drawable,
    inputs: Tensor | Mapping[str, Any],
    num_draws: Count = 8,
    *,
    mix: bool = True,
    temperature: NonNegative = 0.0,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Generation:
    r"""Continue B prompts with S draws of a language model, as one batch of S B rows.

    With `mix`, the draws write one text together. Each token comes from the predictive distribution given the previous tokens,

    $$ p(y_t | y_{<t}) = \sum_s w_s\, p_s(y_t | y_{<t}), \qquad w_s \propto \prod_{u < t} p_s(y_u | y_{<u}) $$

    so that the product over t is the probability of the text under the mixture of draws. A draw that finds the text unlikely gets
    less and less weight. If `mix` is false, each draw writes its own text.

    Args:
        predictor: A `BayesianNetwork` or `Laplace` over a transformers model, with linear weights under the posterior.
        inputs: Tokens of the prompts [B, T], or a dict with `input_ids` and `attention_mask` (prompts padded on the left).
        num_draws: Number of draws S.
        mix: Whether the draws write one text together.
        temperature: Temperature T. If it is 0, the most probable token is chosen; otherwise tokens are drawn from $p^{1 / T}$.
        generator: Source of randomness for draws and tokens.
        options: Options of the model's `generate`, such as `max_new_tokens`; beam search is not supported.

    Raises:
        ValueError: If the model has no `generate`, prompts are not [B, T], or `options` ask for several beams.
    """
    if options.get("num_beams", 1) != 1 or options.get("do_sample"):
        raise ValueError("generate: num_beams and do_sample do not work with draws; give temperature= to sample tokens")
    draws = predictor.draw(num_draws, generator=generator)
    network: Any = draws.runner.network
    inner = network.get_base_model() if hasattr(network, "get_base_model") else network  # inside a peft model
    if not hasattr(inner, "generate"):
        raise ValueError(
            f"generate: {type(inner).__name__} has no method generate; give a transformers language model, such as GPT2LMHeadModel"
        )
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    prompts = given.get("input_ids")
    if prompts is None or prompts.ndim != 2:
        found = "there are no input_ids" if prompts is None else f"input_ids are {list(prompts.shape)}"
        raise ValueError(f"generate: {found}; give tokens of prompts [B, T], or tokens.unsqueeze(0) for one prompt")
    weights, _, repeated = as_rows(draws.materialize().weights, (), given)
    recorder = _Mixture(num_draws, mix, temperature, generator)
    sampling = {**options, **repeated, "logits_processor": [recorder], "do_sample": False, "num_beams": 1}
    tokens: Tensor = draws.runner.evaluating().call(weights, (), sampling, protect=False, method="generate")
    tokens = tokens.unflatten(0, (num_draws, -1))
    ends = options.get("eos_token_id", network.generation_config.eos_token_id)
    log_probs, information = recorder.finish([] if ends is None else [ends] if isinstance(ends, int) else list(ends))
    return Generation(tokens[0] if mix else tokens, log_probs, information)


class _Mixture:
    """A logits processor that mixes draws, chooses the next token of each text, and records it.

    It is called with tokens [S B, t] and logits [S B, V], and returns logits that are largest at the chosen token.
    """

    def __init__(self, num_draws: int, mix: bool, temperature: float, generator: torch.Generator | None) -> None:
        self.num_draws, self.mix, self.temperature, self.generator = num_draws, mix, temperature, generator
        self.log_probs: list[Tensor] = []
        self.information: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.weights: Tensor | None = None
        self.last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        each = scores.float().log_softmax(-1).unflatten(0, (self.num_draws, -1))  # [S, B, V]
        if self.weights is None:
            self.weights = each.new_full(each.shape[:2], -math.log(self.num_draws))
        elif self.last is not None:
            before = input_ids.unflatten(0, (self.num_draws, -1))[..., -1:]
            self.weights = (self.weights + self.last.gather(-1, before).squeeze(-1)).log_softmax(0)
        mixed = each
        if self.mix:
            self.last = each
            mixed = (each + self.weights.unsqueeze(-1)).logsumexp(0, keepdim=True)  # [1, B, V]
            inside = -(self.weights.exp() * (each.exp() * each.clamp_min(-1e4)).sum(-1)).sum(0)
            self.information.append((-(mixed.exp() * mixed.clamp_min(-1e4)).sum(-1)[0] - inside).clamp_min(0))
        choice = mixed
        if self.temperature > 0:
            device = None if self.generator is None else self.generator.device
            uniform = torch.rand(mixed.shape, generator=self.generator, device=device or mixed.device).to(mixed)
            gumbel = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
            choice = mixed / self.temperature + gumbel  # Gumbel noise makes the argmax a sampled token
        token = choice.argmax(-1, keepdim=True)
        self.log_probs.append(mixed.gather(-1, token).squeeze(-1))
        self.chosen.append(token.squeeze(-1))
        picked = torch.full_like(scores, -torch.inf)
        rows = token.expand(self.num_draws, -1, -1).reshape(-1, 1)
        return picked.scatter(-1, rows, 0.0)

    def finish(self, ends: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and mutual information of the new tokens, 0 after a token that ends a text."""
        chosen = torch.stack(self.chosen, dim=-1)
        at_end = torch.isin(chosen, chosen.new_tensor(ends)).long()
        ended = at_end.cumsum(-1) > at_end
        log_probs = torch.stack(self.log_probs, dim=-1).masked_fill(ended, 0.0)
        if not self.mix:
            return log_probs, torch.zeros_like(log_probs[0])
        return log_probs[0], torch.stack(self.information, dim=-1).masked_fill(ended[0], 0.0)
