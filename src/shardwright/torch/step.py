"""`smp.step` as a module: the class of step results.

The attribute `smp.step` is the decorator; this module is only reached by its full name.
"""

from __future__ import annotations

from shardwright.pipeline.outputs import StepOutput

__all__ = ["StepOutput"]
