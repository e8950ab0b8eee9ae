"""scikit-learn estimators that train any method on a table."""

from bayesify.arguments.installing import how_to_install

try:
    import sklearn as sklearn
except ImportError as error:
    raise ImportError(f"bayesify.sklearn needs scikit-learn; {how_to_install('sklearn')}") from error

from bayesify.sklearn.classifier import BayesianClassifier
from bayesify.sklearn.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
