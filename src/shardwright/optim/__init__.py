"""The fused optimizers that the original shipped, in plain PyTorch."""
