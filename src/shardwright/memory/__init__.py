"""Memory: recompute activations in backward, keep their inputs in host memory, build parameters on their owner only."""
