"""`from shardwright.estimator import PyTorch`: run a job described for the original's estimator on this machine."""

from shardwright.launch.estimator import PyTorch
from shardwright.launch.local_job import TrainingJob

__all__ = ["PyTorch", "TrainingJob"]
