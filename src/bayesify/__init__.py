"""bayesify turns any PyTorch network into a Bayesian one.

bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
bayesify.fit(bnn, train_loader, epochs=10)
bnn.predict(x).probs
"""

from bayesify import likelihoods, posteriors, priors
from bayesify.draws import Draw, Draws
from bayesify.network import BayesianNetwork, bayesianize, count_parameters
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from bayesify.version import __version__

__all__ = [
    "BayesianNetwork",
    "ClassificationPredictive",
    "Draw",
    "Draws",
    "Predictive",
    "RegressionPredictive",
    "__version__",
    "bayesianize",
    "count_parameters",
    "likelihoods",
    "posteriors",
    "priors",
]
