"""Retraining at high sparsity. No mask needs to be held fixed: the units are gone, the model stays as small as it is.

train.py   the training itself, in place
job.py     from a pruned directory to a retrained one
"""

from shearling.retrain.job import retrain_source
from shearling.retrain.train import Recipe, Trained, retrain

__all__ = ["Recipe", "Trained", "retrain", "retrain_source"]
