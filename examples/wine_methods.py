"""Several methods on one table through scikit-learn's interface.

178 wines of three cultivars, thirteen measurements each; five-fold cross-validation.
"""

import sys

from sklearn.datasets import load_wine
from sklearn.model_selection import cross_validate

from bayesify.sklearn import BayesianClassifier

METHODS = ("point", "mean_field", "ensemble", "dropout", "laplace")


def main(figure: str | None = None) -> None:
    table, labels = load_wine(return_X_y=True)
    loss = {}
    print(f"{'method':<12} {'accuracy':>9} {'NLL':>7}")
    for method in METHODS:
        model = BayesianClassifier(method, hidden=(20,), epochs=30, random_state=0)
        found = cross_validate(
            model, table, labels, cv=5, scoring=("accuracy", "neg_log_loss")
        )
        loss[method] = -found["test_neg_log_loss"]
        accuracy = found["test_accuracy"].mean()
        print(f"{method:<12} {accuracy:>9.3f} {loss[method].mean():>7.3f}")
        assert accuracy > 0.9

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        axes.boxplot(list(loss.values()), orientation="horizontal")
        axes.set_yticklabels(list(loss))
        axes.set(xlabel="NLL, nats per wine, five folds")
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
