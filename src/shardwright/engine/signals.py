"""A last checkpoint when the scheduler wants the machine back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from shardwright.engine.checkpointing import save_checkpoint
from shardwright.engine.model import DistributedModel
from shardwright.errors import UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.pipeline.step import step_is_active
from shardwright.topology import context
from shardwright.transport import collectives

_log = get_logger(__name__)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SaveOnSignal:
    """Watches for signals and saves at the next step boundary, see `save_on_signal`.

    Also a context manager, at whose end the former handlers are back.
    """

    def __init__(
        self,
        path: Any,
        *,
        model: DistributedModel | None,
        optimizer: Any,
        signals: Sequence[int],
        options: Mapping[str, Any],
    ) -> None:
        self._path = path
        self._model = model
        self._optimizer = optimizer
        self._options = dict(options)
        self._received: int | None = None
        self._saved = False
        self._before: dict[int, _Handler] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only take note: a save is collective, and this rank may be anywhere. Further signals change nothing."""
        if self._received is None:
            self._received = number

    @property
    def received(self) -> bool:
        """Has this very rank got a signal?"""
        return self._received is not None

    def should_stop(self, tag: str | int, user_content: Any = None) -> bool:
        """Save and return True if any rank has got a signal; else return False at once.

        Called by: every rank of the world, between two steps, with the same tag. Collectives: one all-reduce of one number
            over the world; when it is time, those of `save_checkpoint`. After a save it returns True without either.
        tag, user_content: of the checkpoint, if one is saved now.
        Raises: what `save_checkpoint` raises, on every rank.
        """
        if self._saved:
            return True
        if step_is_active():
            raise UsageError(
                "should_stop() was called inside a step function", remedy="call it after optimizer.step()"
            )
        flag = torch.tensor([self._received or 0], dtype=torch.int32)
        collectives.all_reduce(flag, "world", op="max")
        number = int(flag)
        if not number:
            return False
        if rank_zero():
            _log.warning("%s came: saving %r, then stopping", signal.Signals(number).name, tag)
        save_checkpoint(
            self._path, tag, model=self._model, optimizer=self._optimizer, user_content=user_content, **self._options
        )
        self._saved = True
        return True

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> SaveOnSignal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def save_on_signal(
    path: Any,
    *,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    signals: Sequence[int] = (signal.SIGTERM,),
    **options: Any,
) -> SaveOnSignal:
    """Prepare for a signal that announces the end of the job: from then on it no longer ends this process.

    Called by: every rank, on the main thread, once. No communication.

        stop = smp.save_on_signal(path, model=model, optimizer=optimizer)
        for step, batch in enumerate(batches, first_step):
            train_step(model, batch)
            optimizer.step()
            if stop.should_stop(tag=f"step_{step}", user_content={"step": step}):
                break

    It is enough if one rank gets the signal: all ranks save after the same step, and leave the loop together. With
    `shardwright run` a signal to the launcher reaches all ranks; give them time to save with `--grace-s`.
    path, options: as in `save_checkpoint`.   signals: which ones.
    Raises: UsageError off the main thread, where Python can't catch signals, and before `smp.init`.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("save_on_signal() was called on another thread", remedy="call it on the main thread")
    if not context.is_initialized():
        raise UsageError("save_on_signal() was called before smp.init()", remedy="call smp.init() first")
    return SaveOnSignal(path, model=model, optimizer=optimizer, signals=signals, options=options)
