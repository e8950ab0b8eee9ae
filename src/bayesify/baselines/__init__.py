"""Baseline methods to which the papers compare their own methods."""

from bayesify.baselines.ensemble_members import fit_members
from bayesify.baselines.fixed_draws import Chains, FixedDraws
from bayesify.baselines.ivon import IVON
from bayesify.baselines.microcanonical import microcanonical
from bayesify.baselines.noisy_kfac import NoisyKFAC
from bayesify.baselines.nuts import nuts
from bayesify.baselines.sghmc import sghmc
from bayesify.baselines.swag import SWAG
from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.baselines.vogn import VOGN

__all__ = [
    "IVON",
    "SWAG",
    "VOGN",
    "Chains",
    "FixedDraws",
    "NoisyKFAC",
    "TemperatureScaling",
    "fit_members",
    "microcanonical",
    "nuts",
    "sghmc",
]
