"""All public names of `bayesify`. The package loads this module when a name is first used."""

from bayesify import (
    acquisition,
    baselines,
    conformal,
    datasets,
    deep_gp,
    function_space,
    likelihoods,
    metrics,
    models,
    posteriors,
    priors,
    random_features,
    subnetwork,
    transforms,
)
from bayesify.conversion import bayesianize
from bayesify.draws import Draw, Draws
from bayesify.function_space import Box, FunctionSpaceVI
from bayesify.laplace import Laplace
from bayesify.network import BayesianNetwork, prune
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.storage import serializers
from bayesify.storage.save_load import load, save
from bayesify.training.batch_statistics import keep_draws
from bayesify.training.checking import check
from bayesify.training.fitting import fit
from bayesify.training.history import History
from bayesify.training.schedules import KLSchedule
from bayesify.version import __version__
from bayesify.weights.catalog import count_parameters

# Scikit-learn is optional, so the estimators are imported only when a file holds an estimator.
serializers.MODULES_BY_KIND.update(BayesianRegressor="bayesify.sklearn", BayesianClassifier="bayesify.sklearn")

__all__ = [
    "BayesianNetwork",
    "Box",
    "ClassificationPredictive",
    "Draw",
    "Draws",
    "FunctionSpaceVI",
    "History",
    "KLSchedule",
    "Laplace",
    "Predictive",
    "RegressionPredictive",
    "__version__",
    "acquisition",
    "baselines",
    "bayesianize",
    "check",
    "conformal",
    "count_parameters",
    "datasets",
    "deep_gp",
    "fit",
    "function_space",
    "keep_draws",
    "likelihoods",
    "load",
    "metrics",
    "models",
    "posteriors",
    "priors",
    "prune",
    "random_features",
    "save",
    "subnetwork",
    "transforms",
]
