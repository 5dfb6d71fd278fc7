"""Everything a training script uses: `import shardwright.torch as smp`.

`import smdistributed.modelparallel.torch as smp` gives this very module. It holds names and nothing else:
each is defined in the layer it belongs to. Importing it needs no process group and touches no device.
Names that do not work yet are listed in `_not_built`.
"""

from __future__ import annotations

from shardwright.engine.state import state
from shardwright.torch import (
    _not_built,
    amp,
    debugging,
    model,
    nn,
    optimizers,
    patches,
    sharded_data_parallel_checkpoint,
    state_mod,
    utils,
)
from shardwright.torch import step as _step_module  # noqa: F401  loaded for those who import it by name

# isort: split
# The layers below, one line each. They come after the submodules, because loading the file `step.py` binds
# the name `step`, which has to end up being the decorator.

__all__ = [
    "amp",
    "debugging",
    "delay_param_initialization",
    "delayed_param_initialization",
    "delayed_parameter_initialization",
    "hvd_average_grads",
    "load",
    "model",
    "model_creation",
    "nn",
    "optimizers",
    "patches",
    "register_parameter",
    "save",
    "save_on_signal",
    "set_activation_checkpointing",
    "set_tensor_parallelism",
    "sharded_data_parallel_checkpoint",
    "state",
    "state_mod",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
    "utils",
]

delay_param_initialization = _not_built.function("delay_param_initialization")
hvd_average_grads = _not_built.function("hvd_average_grads")
load = _not_built.function("load")
model_creation = _not_built.function("model_creation")
register_parameter = _not_built.function("register_parameter")
save = _not_built.function("save")
save_on_signal = _not_built.function("save_on_signal")
set_activation_checkpointing = _not_built.function("set_activation_checkpointing")
set_tensor_parallelism = _not_built.function("set_tensor_parallelism")
tensor_parallelism = _not_built.function("tensor_parallelism")
tp_register = _not_built.function("tp_register")
tp_register_with_module = _not_built.function("tp_register_with_module")

# The original's documents spell this one in three ways.
delayed_param_initialization = delay_param_initialization
delayed_parameter_initialization = delay_param_initialization
