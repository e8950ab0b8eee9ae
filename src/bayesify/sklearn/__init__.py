"""scikit-learn estimators: any method on a table of numbers."""

from bayesify.sklearn.classifier import BayesianClassifier
from bayesify.sklearn.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
