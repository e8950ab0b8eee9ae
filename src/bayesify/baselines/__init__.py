"""Methods that the papers compare with."""

from bayesify.baselines.ensemble_members import fit_members
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.baselines.from_task import fit_hmc, fit_swag, natural_recipe
from bayesify.baselines.noisy_kfac import NoisyKFAC
from bayesify.baselines.nuts import nuts
from bayesify.baselines.swag import SWAG
from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.baselines.vogn import VOGN
from bayesify.posteriors.matrix_normal import MatrixNormal
from bayesify.posteriors.mean_field import MeanField
from bayesify.registry import Method, register

__all__ = ["SWAG", "VOGN", "FixedDraws", "NoisyKFAC", "TemperatureScaling", "fit_members", "nuts"]

register(
    Method(
        "swag",
        "SWAG",
        "Maddox et al. 2019",
        "(K + 2) P",
        fit=fit_swag,
        used_as="baselines.SWAG",
        options={"learning_rate": 1e-3},
        trials=({"learning_rate": 0.01}, {"learning_rate": 0.001}, {"learning_rate": 0.003}),
        starts_at_point=True,
        cost_rank=2,
    )
)
register(
    Method(
        "vogn",
        "VOGN",
        "Khan et al. 2018",
        "2 P",
        fit=natural_recipe(VOGN, MeanField),
        used_as="baselines.VOGN",
        options={"learning_rate": 1.0},
        slow=True,
        trials=({"learning_rate": 0.1}, {"learning_rate": 0.05}, {"learning_rate": 0.2}),
        draws_in_steps=True,
    )
)
register(
    Method(
        "nng",
        "Noisy natural gradient",
        "Zhang et al. 2018",
        "P + (d_out^2 + d_in^2) / 2 per layer",
        fit=natural_recipe(NoisyKFAC, MatrixNormal),
        used_as="baselines.NoisyKFAC",
        options={"learning_rate": 0.3},
        aliases=("noisy_kfac", "noisy_natural_gradient"),
        slow=True,
        trials=({"learning_rate": 0.1}, {"learning_rate": 0.05}, {"learning_rate": 0.2}),
        draws_in_steps=True,
    )
)
register(
    Method(
        "hmc",
        "Hamiltonian Monte Carlo",
        "Hoffman & Gelman 2014",
        "K P",
        fit=fit_hmc,
        used_as="baselines.nuts",
        aliases=("nuts",),
        slow=True,
        extra="pyro",
        is_chain=True,
        max_weights=5000,
    )
)
