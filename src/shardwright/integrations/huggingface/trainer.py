"""What the `Trainer` of transformers needs besides the public API, when it runs under its SageMaker mode.

The Trainer wraps the model and the optimizer by itself, and saves and resumes by our functions. But it hands the rest to
accelerate, which knows nothing of stages (see `accelerator`), and some of it has gone missing over time:

- 4.57 and 5.x make the optimizer from the bare model, whose parameters are not those that train once modules are replaced.
- 5.x doesn't make an optimizer at all, and wraps the model a second time to evaluate.
- Every stage writes the same file of random states, and nobody that of distributed modules.

Where nothing of this is so, the replacements do what the Trainer's own methods do.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

from shardwright import log
from shardwright.engine.state import state
from shardwright.import_hooks import when_imported
from shardwright.tensor_parallel import randomness
from shardwright.topology import accessors

_log = log.get_logger(__name__)
_MODULE = "transformers.trainer"


def install() -> None:
    """Adapt the Trainer as soon as a script imports it. Called once, by the public face; imports nothing itself."""
    when_imported(_MODULE, _adapt)


def _adapt() -> None:
    module: Any = sys.modules[_MODULE]
    if not module.is_sagemaker_mp_enabled() or not hasattr(module, "Accelerator"):
        return
    from shardwright.integrations.huggingface.accelerator import ModelParallelAccelerator

    module.Accelerator = ModelParallelAccelerator
    trainer = module.Trainer
    _wrap_once(trainer)
    _make_optimizer_of_the_wrapped_model(trainer)
    _keep_random_states(trainer)
    log.once(_log, logging.INFO, "transformers.Trainer: data, metrics and clipping follow the model parallel ranks")


def _wrap_once(trainer: Any) -> None:
    wrap = trainer._wrap_model

    @functools.wraps(wrap)
    def wrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self.model and state.model is not None and self.model_wrapped is state.model:
            return self.model_wrapped
        self.model_wrapped = wrap(self, model, *args, **kwargs)
        return self.model_wrapped

    trainer._wrap_model = wrap_model


def _make_optimizer_of_the_wrapped_model(trainer: Any) -> None:
    make, schedule = trainer.create_optimizer, trainer.create_scheduler
    takes_model = "model" in inspect.signature(make).parameters

    @functools.wraps(make)
    def create_optimizer(self: Any, model: Any = None) -> Any:
        if isinstance(self.optimizer, _wrapped_kind()):
            return self.optimizer
        return make(self, self.model_wrapped if model is None else model) if takes_model else make(self)

    @functools.wraps(schedule)
    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        if not isinstance(self.optimizer, _wrapped_kind()):
            self.create_optimizer()
        return schedule(self, num_training_steps, optimizer)

    trainer.create_optimizer = create_optimizer
    trainer.create_scheduler = create_scheduler


def _wrapped_kind() -> type:
    """What wrapped optimizers are instances of: no other class, before there is one."""
    return type(state.optimizer) if state.optimizer is not None else _Nothing


class _Nothing:
    pass


def _keep_random_states(trainer: Any) -> None:
    save, load = trainer._save_rng_state, trainer._load_rng_state

    @functools.wraps(save)
    def save_rng_state(self: Any, output_dir: str) -> None:
        """Files are named after the data-parallel rank, which all stages and tensor parallel peers of equal data share."""
        same_data = accessors.pp_rank() == 0 and (accessors.tp_rank() == 0 or not state.cfg.prescaled_batch)
        if same_data:
            save(self, output_dir)
        streams = randomness.state()
        if streams["base"] is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            _streams_file(output_dir).write_text(json.dumps(streams), encoding="utf-8")

    @functools.wraps(load)
    def load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None and _streams_file(checkpoint).is_file():
            randomness.set_state(json.loads(_streams_file(checkpoint).read_text(encoding="utf-8")))

    trainer._save_rng_state = save_rng_state
    trainer._load_rng_state = load_rng_state


def _streams_file(folder: str) -> Path:
    """Where this rank keeps the position of the random streams of its distributed modules."""
    return Path(folder, f"rng_streams_{accessors.rank()}.json")
