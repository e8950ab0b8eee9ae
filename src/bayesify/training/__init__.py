"""Training: `fit`, the one loop, batches, checkpoints, history, schedules and processes."""

from bayesify.training.fitting import fit
from bayesify.training.history import History
from bayesify.training.schedules import KLSchedule
from bayesify.training.stack import ModelStack

__all__ = ["History", "KLSchedule", "ModelStack", "fit"]
