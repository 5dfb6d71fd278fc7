"""The exceptions users see, and the form of their messages.

A message says what happened, where, and what to do:

    ShapeError: 'hidden' is [8, 511, 1024], expected [8, 512, 1024]
      at world rank 5 (pp 2, tp 1, rdp 0), microbatch 3, module 'transformer.h.7'
      try: pad sequences to a multiple of tensor_parallel_degree (2)
"""

from __future__ import annotations


class ShardwrightError(Exception):
    """Base of every error this library raises on purpose.

    what: one sentence with the offending name and value and what was expected.
    where: rank, microbatch, module - whatever is known.
    remedy: what the reader can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if remedy:
            lines.append(f"  try: {remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(
    cls: type[ShardwrightError], what: str, where: str | None, remedy: str | None
) -> ShardwrightError:
    return cls(what, where=where, remedy=remedy)


class ConfigError(ShardwrightError, ValueError):
    """A configuration key, or a combination of keys, that cannot work."""


class ShapeError(ShardwrightError, ValueError):
    """A tensor whose shape does not fit what is asked of it."""


class UsageError(ShardwrightError, RuntimeError):
    """A call at the wrong moment, in the wrong order, or with the wrong kind of object."""


class NotInitializedError(UsageError):
    """A call that needs ranks came before `smp.init()`."""


class NotBuiltError(ShardwrightError, NotImplementedError):
    """A name or setting that exists but does not work yet; the message says what is missing."""


class PartitionError(ShardwrightError, ValueError):
    """A placement of modules on stages that cannot be used."""


class PipelineError(ShardwrightError, RuntimeError):
    """The pipeline met an operation or a value it cannot run exactly."""


class UnsupportedOperationError(PipelineError):
    """An operation on placed tensors that is refused by name, because it could not be exact."""


class AgreementError(PipelineError):
    """Ranks of one pipeline group ran different programs."""


class RemoteRankError(ShardwrightError, RuntimeError):
    """Another rank failed; its reason is in the message."""


class LostRankError(ShardwrightError, RuntimeError):
    """Another rank went away without a word (killed, out of memory, host lost)."""


class CommunicationTimeout(ShardwrightError, TimeoutError):
    """A wait of the library ran out of time; the message names the ranks waited for."""


class JobFailedError(ShardwrightError, RuntimeError):
    """A training job that an estimator started has failed; the message has the report on the failing rank."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint asked for is not there."""
