"""Objects that the microbatches of a step share: a running total, a buffer that glue changes.

In one process microbatches run one after the other. Here they take turns, in an order that differs between ranks,
so whoever reads or changes a shared object first lets the microbatches before it come as far as itself: through
forward, or, after its own backward, to their end. All ranks then see the object change in the order of one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.placed import PlacedTensor

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame
    from shardwright.pipeline.runtime import Registered, Runtime


class SharedUses:
    """Which microbatches of a step have used each shared object, on this rank."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, bool, Any]] = {}
        self._read: dict[int, int] = {}

    def is_last(self, frame: Frame, thing: Any) -> bool:
        """Has this microbatch used `thing` before, on the same side of its backward, and no one since?

        The same on all ranks: until the microbatch is past forward those after it keep off.
        """
        last, was_in_backward, _ = self._last.get(id(thing), (-1, False, None))
        return last == frame.index and was_in_backward == frame.in_backward

    def note(self, frame: Frame, thing: Any) -> None:
        """Remember that a microbatch uses `thing`, and may change it. Raises if a later one used it already."""
        self._refuse_after(max(self._last.get(id(thing), (-1,))[0], self._read.get(id(thing), -1)), frame)
        self._last[id(thing)] = (frame.index, frame.in_backward, thing)

    def note_read(self, frame: Frame, thing: Any) -> None:
        """The same for one that only reads, in whatever order. Raises if a later one may have changed it."""
        self._refuse_after(self._last.get(id(thing), (-1,))[0], frame)
        self._read[id(thing)] = max(frame.index, self._read.get(id(thing), -1))

    def _refuse_after(self, last: int, frame: Frame) -> None:
        if last > frame.index:
            raise UnsupportedOperationError(
                f"microbatch {frame.index} uses a tensor or buffer that microbatch {last} has used already, in another"
                " order than one process would",
                where=frame.where("glue"),
                remedy="use what microbatches share either before model.backward() or after it, alike in every step",
            )


def resolve_foreign(frame: Frame, placed: PlacedTensor) -> Any:
    """A tensor of another microbatch, in the state in which that one left it: the object to read.

    Raises if it comes from a later microbatch of the step: something kept outside was overwritten meanwhile.
    """
    other = placed._value.frame
    if other.uses is frame.uses and other.index > frame.index:
        raise UnsupportedOperationError(
            f"microbatch {frame.index} found a tensor of microbatch {other.index} where its own was kept (an attribute,"
            " a global): microbatches are in flight together",
            where=frame.where("glue"),
            remedy="pass tensors on as arguments and results",
        )
    buffer = _buffer_at(frame.runtime, placed)
    frame.in_order(placed if buffer is None else buffer)
    if buffer is not None and buffer.home is not None:
        now = buffer.home[0]._buffers.get(buffer.home[1])
        if type(now) is PlacedTensor and now._value.frame is not frame:
            return now
    newest = frame.runtime.overlay.newest(frame.index, placed)
    return newest if type(newest) is PlacedTensor else placed


def _buffer_at(runtime: Runtime, placed: PlacedTensor) -> Registered | None:
    """The buffer whose place a placed tensor has taken, if it has."""
    for entry in runtime.registered.values():
        if entry.home is not None and entry.home[0]._buffers.get(entry.home[1]) is placed:
            return entry
    return None


def read_buffer(frame: Frame, buffer: Registered) -> PlacedTensor | None:
    """Before glue reads a buffer: what an earlier microbatch assigned to it, or None if it is as it was."""
    assert buffer.home is not None
    module, key = buffer.home
    buffer.used = True
    if module.training in buffer.steady:
        frame.uses.note_read(frame, buffer)
        return None
    frame.in_order(buffer)
    now = module._buffers.get(key)
    return now if type(now) is PlacedTensor and now._value.frame is not frame else None


def step_ends(runtime: Runtime) -> list[Registered]:
    """Learn which buffers glue only reads; returns those that hold placed tensors now."""
    assigned = []
    for entry in runtime.registered.values():
        if entry.home is None:
            continue
        module, key = entry.home
        if type(module._buffers.get(key)) is PlacedTensor:
            assigned.append(entry)
            entry.changed = True
        if entry.changed:
            entry.steady.clear()
        elif entry.used:
            entry.steady.add(module.training)
        entry.used = entry.changed = False
    return sorted(assigned, key=lambda entry: entry.name)
