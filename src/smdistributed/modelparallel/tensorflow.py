"""TensorFlow is not implemented; importing this says so."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow is not implemented: Shardwright covers PyTorch only. "
    "Use smdistributed.modelparallel.torch."
)
