# %% [markdown]
# # Intervals for a table
#
# The diabetes data of scikit-learn contain ten measurements of 442 patients, and the
# progression of the disease after a year. `BayesianRegressor` takes the data frame as
# it is, and chooses a distribution for the target. `BayesianRegressor` calibrates its
# intervals on held-out rows.

# %%
import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from bayesify.sklearn import BayesianRegressor

patients, progression = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
train, test, y_train, y_test = train_test_split(patients, progression, random_state=0)
print(train.head(3))

# %% [markdown]
# ## Train and predict
#
# You need not choose any argument. `choices_` shows the settings that the estimator
# chose on held-out rows.

# %%
model = BayesianRegressor(random_state=0).fit(train, y_train)
print("likelihood:", model.choices_["likelihood"])
lower, upper = model.predict_interval(test, level=0.9)
inside = (lower <= y_test) & (y_test <= upper)
print(f"{inside.mean():.0%} of {len(test)} new patients lie in their 90 % interval")
assert 0.8 < inside.mean() < 0.98

# %%
mean = model.predict(test)
rank = np.argsort(mean)
figure, axes = plt.subplots(figsize=(9, 3))
place = np.arange(len(rank))
axes.fill_between(place, lower[rank], upper[rank], alpha=0.3, label="90 % interval")
axes.plot(place, mean[rank], label="mean")
axes.plot(place, y_test.to_numpy()[rank], ".", markersize=4, label="patients")
axes.set(xlabel="test patients, by predicted mean", ylabel="progression")
axes.legend(loc="upper left")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Why this prediction?
#
# `explain` shows which columns move a prediction away from a typical patient, and which
# columns widen its interval.

# %%
reasons = model.explain(test[:2])
for row in range(2):
    print(f"patient {row}: predicted {mean[row]:.0f}")
    print("  moved by  ", reasons.told("moves")[row])
    print("  widened by", reasons.told("widens")[row])

# %% [markdown]
# ## Rows unlike the training rows
#
# Suppose that somebody entered the body mass index in the wrong unit. `unusual` flags
# these rows before anybody relies on their intervals.

# %%
wrong = test[:2].assign(bmi=test["bmi"][:2] * 100)
print("as they are:", model.unusual(test[:2]), " wrong unit:", model.unusual(wrong))
assert model.unusual(wrong).all()
