"""Convergence of Markov chains: potential scale reduction and effective sample size of several chains."""

import torch
from torch import Tensor


def split_r_hat(values: Tensor) -> Tensor:
    r"""Potential scale reduction of chains that are split in halves (Gelman et al. 2013, equation 11.4); the value is 1 if the
    chains agree.

    $$ \hat R^2 = \frac{T - 1}{T} + \frac{B}{W}, \quad B = \operatorname{var}_c(\bar v_c), \quad W = \operatorname{mean}_c(s_c^2) $$

    The result is the larger of two values: $\hat R$ of the numbers themselves, and $\hat R$ of their distances from the
    median. Chains with the same mean but different widths therefore disagree (Vehtari et al. 2021, section 4.2). The numbers are
    [C, T, ...], from C chains of T steps, where T is at least 4. The result is [...], in float64. It is 1 for a number that never
    changes.
    """
    values = _halves(values)
    center = values.flatten(0, 1).median(0).values
    return torch.maximum(_r_hat(values), _r_hat((values - center).abs()))


def effective_sample_size(values: Tensor) -> Tensor:
    r"""Number of independent draws whose mean is as precise as the mean of all steps (Vehtari et al. 2021, equations 10 to 13).

    $$ \mathrm{ESS} = \frac{C T}{1 + 2 \sum_{t \ge 1} \rho_t}, \qquad \rho_t = 1 - \frac{W - \gamma_t}{W (T - 1) / T + B}. $$

    Here $\gamma_t$ is the mean over chains of the autocovariance at lag t; `split_r_hat` defines B and W.

    Chains are split in halves first. The sum over lags ends when the sum of two neighboring autocorrelations is no
    longer positive. A sum of two neighbors that exceeds an earlier sum is lowered to the earlier sum (Geyer 1992). The numbers
    are [C, T, ...], from C chains of T steps, where T is at least 4. The result is [...], in float64, and at most C T log10(C T).
    """
    values = _halves(values)
    chains, steps = values.shape[:2]
    centered = values - values.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centered, n=2 * steps, dim=1).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * steps, dim=1)[:, :steps] / steps  # [C, T, ...]
    within = covariance[:, 0].mean(0) * steps / (steps - 1)
    total = within * (steps - 1) / steps + values.mean(1).var(0)
    rho = 1 - (within - covariance.mean(0)) / total.clamp_min(torch.finfo(total.dtype).tiny)  # [T, ...]
    rho[0] = 1.0
    pairs = rho[: steps // 2 * 2].unflatten(0, (-1, 2)).sum(1)  # [T / 2, ...]
    positive = (pairs > 0).to(pairs).cumprod(0)
    pairs = (pairs.clamp_min(0) * positive).cummin(0).values
    count = float(chains * steps)
    longest = torch.log10(torch.tensor(count, dtype=values.dtype, device=values.device))
    found: Tensor = count / (2 * pairs.sum(0) - 1).clamp_min(1 / longest)
    return found


def _halves(values: Tensor) -> Tensor:
    """Chains [C, T, ...] split in halves, [2 C, T // 2, ...], in float64."""
    steps = values.shape[1]
    half = steps // 2
    if half < 2:
        raise ValueError(f"chains of {steps} steps are too short to compare their halves; give at least 4 steps")
    return torch.cat((values[:, :half], values[:, steps - half :])).double()


def _r_hat(values: Tensor) -> Tensor:
    steps = values.shape[1]
    within, between = values.var(1).mean(0), values.mean(1).var(0)
    found = ((steps - 1) / steps + between / within).sqrt()
    return torch.where(within + between > 0, found, torch.ones_like(found))
