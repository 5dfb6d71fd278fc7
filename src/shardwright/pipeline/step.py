"""The step decorator: split the inputs, run the body once per microbatch, collect what it returns.

With one pipeline stage a step is a loop over microbatches on plain modules. With more, every rank of the
pipeline group runs the body on the inputs of pipeline rank 0 (see `pipeline_step`).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardwright.errors import UsageError
from shardwright.pipeline.microbatch import Microbatch, bind_arguments, check_split_names, split_arguments
from shardwright.pipeline.outputs import collect_outputs
from shardwright.pipeline.pipeline_step import PipelineSteps
from shardwright.topology import context


class Driver(Protocol):
    """What the engine does around a step. It introduces itself with `set_driver`."""

    pipeline: PipelineSteps | None

    def step_begins(self) -> None:
        """Before the first microbatch, on every rank."""

    def microbatch_begins(self, index: int, num_microbatches: int) -> None:
        """Before each microbatch; with pipeline stages on the microbatch's own thread."""

    def step_ends(self) -> None:
        """After the last microbatch: gradients are reduced, hooks run."""

    def step_failed(self) -> None:
        """The step raised; nothing of it may be left for the next one."""


_driver: Driver | None = None
_driver_world: object = None
_active = threading.Event()


def set_driver(driver: Driver | None) -> None:
    """Let the engine's model take part in the steps of this world (None: no model)."""
    global _driver, _driver_world
    _driver, _driver_world = driver, context.world().groups if driver is not None else None


def step_is_active() -> bool:
    """True while a step call runs in this process."""
    return _active.is_set()


class StepFunction:
    """A decorated function. Calling it runs a step; it is not a method even in a class body.

    Called by: every rank of the world, with the same function in the same order.
    Returns: the body's nesting with a StepOutput for each tensor and a list for each other leaf, on every
    rank.
    Raises: ShapeError if a batch does not divide into microbatches (a step that calls no backward may be
        uneven), on all ranks of the pipeline group, before anything is sent.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str] | None,
        input_split_axes: Mapping[str, int] | None,
        detach_outputs: bool,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        self._non_split = tuple(non_split_inputs or ())
        self._axes = dict(input_split_axes or {})
        self._detach = detach_outputs
        check_split_names(self._signature, self._non_split, self._axes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _active.is_set():
            raise UsageError(
                f"step function '{self._function.__name__}' was called inside another step",
                remedy="call plain functions from a step body",
            )
        world = context.world()
        driver = _driver if _driver_world is world.groups else None
        pipeline = driver.pipeline if driver is not None else None
        if pipeline is None and world.config.pipeline_parallel_degree > 1:
            raise UsageError(
                f"step function '{self._function.__name__}' was called before a model was wrapped",
                remedy="wrap the model first: model = smp.DistributedModel(model)",
            )
        _active.set()
        world.board.step_begins(self._function.__name__)
        try:
            if driver is not None:
                driver.step_begins()
            if pipeline is None or driver is None:
                results, weights = self._loop(driver, args, kwargs)
            else:
                results, weights = pipeline.run(self._function, self._signature, self._split, driver, args, kwargs)
            if driver is not None:
                driver.step_ends()
        except BaseException:
            if driver is not None:
                driver.step_failed()
            raise
        finally:
            _active.clear()
        world.board.step_ends()
        return collect_outputs(results, detach_outputs=self._detach or pipeline is not None, weights=weights)

    def _split(self, args: Any, kwargs: Any) -> list[Microbatch]:
        config = context.world().config
        uneven = not torch.is_grad_enabled()
        return split_arguments(
            self._signature,
            args,
            kwargs,
            config.microbatches,
            self._non_split,
            self._axes,
            allow_uneven=uneven,
        )

    def _loop(self, driver: Driver | None, args: Any, kwargs: Any) -> tuple[list[Any], list[int] | None]:
        bind_arguments(self._signature, args, kwargs)
        microbatches = self._split(args, kwargs)
        results = []
        for index, microbatch in enumerate(microbatches):
            if driver is not None:
                driver.microbatch_begins(index, len(microbatches))
            results.append(self._function(*microbatch.args, **microbatch.kwargs))
        return results, weights_of(microbatches)


def weights_of(microbatches: Sequence[Microbatch]) -> list[int] | None:
    counts = [m.num_samples for m in microbatches]
    return None if any(c is None for c in counts) else [c for c in counts if c is not None]


def step(
    function: Callable[..., Any] | Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    *,
    non_split_inputs: Sequence[str] | None = None,
) -> Any:
    """Make a function the body of a training or evaluation step.

        @smp.step
        def train_step(model, batch, labels):
            loss = loss_function(model(batch), labels)
            model.backward(loss)
            return loss

    Forms: `@step`, `@step()`, `@step(non_split_inputs, input_split_axes, detach_outputs)`.
    non_split_inputs: parameter names passed unchanged to each microbatch.
    input_split_axes: parameter name -> axis along which its tensors are split (0 elsewhere).
    detach_outputs: detach returned tensors. With pipeline stages they always are.
    """
    if callable(function):
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)
    names = non_split_inputs if function is None else function

    def decorate(body: Callable[..., Any]) -> StepFunction:
        return StepFunction(body, names, input_split_axes, detach_outputs)

    return decorate
