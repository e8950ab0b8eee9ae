"""Training: `fit` and the training loop, batches, checkpoints, history, schedules and processes."""

from bayesify.training.arguments import Checkpointing, Devices, Steps, Update, Validation
from bayesify.training.average import Average
from bayesify.training.batches import StackedBatch, StackedBatches
from bayesify.training.checking import check
from bayesify.training.fitting import fit
from bayesify.training.history import History
from bayesify.training.schedules import KLSchedule
from bayesify.training.stack import ModelStack

__all__ = [
    "Average",
    "Checkpointing",
    "Devices",
    "History",
    "KLSchedule",
    "ModelStack",
    "StackedBatch",
    "StackedBatches",
    "Steps",
    "Update",
    "Validation",
    "check",
    "fit",
]
