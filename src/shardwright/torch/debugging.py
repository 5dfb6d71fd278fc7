"""Debugging helpers; the original keeps them in `smdistributed.modelparallel.test.torch.utils`."""

from __future__ import annotations

from shardwright.torch import _not_built

__all__ = ["dump_model", "verify"]

dump_model = _not_built.function("debugging.dump_model")
verify = _not_built.function("debugging.verify")
