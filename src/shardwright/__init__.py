"""Shardwright trains models that do not fit on one device, and checkpoints them.

The PyTorch front end is `shardwright.torch`; this module starts without PyTorch.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
