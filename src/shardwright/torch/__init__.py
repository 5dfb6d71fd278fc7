"""Everything a training script uses: `import shardwright.torch as smp`.

`import smdistributed.modelparallel.torch as smp` gives this very module. It holds names and nothing else:
each is defined in the layer it belongs to. Importing it needs no process group and touches no device.
"""

from __future__ import annotations

from shardwright.emulation import startup as _emulation
from shardwright.engine.state import state
from shardwright.integrations.huggingface import families as _families
from shardwright.integrations.huggingface import output_capture as _output_capture
from shardwright.integrations.huggingface import plan as _plan
from shardwright.integrations.huggingface import trainer as _trainer
from shardwright.tensor_parallel import registry as _registry
from shardwright.torch import (
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

from shardwright.checkpoint.rank_files import load
from shardwright.data_parallel.registered_parameters import register_parameter
from shardwright.engine.checkpointing import (
    prepare_background_save,
    resume_from_checkpoint,
    save_checkpoint,
)
from shardwright.engine.checkpointing import save_object as save
from shardwright.engine.creation import model_creation
from shardwright.engine.grad_clipping import clip_grad_norm
from shardwright.engine.model import DistributedModel
from shardwright.engine.optimizer import DistributedOptimizer
from shardwright.engine.queries import (
    dynamic_shapes,
    get_partition,
    hvd_average_grads,
    num_microbatches,
    set_partition,
)
from shardwright.engine.recomputation import set_activation_checkpointing
from shardwright.engine.signals import save_on_signal
from shardwright.integrations.huggingface.export import export_huggingface
from shardwright.memory.delayed_init import delay_param_initialization
from shardwright.partition.manual import partition
from shardwright.partition.trace import is_tracing
from shardwright.pipeline.outputs import StepOutput
from shardwright.pipeline.step import step
from shardwright.tensor_parallel.registry import tp_register, tp_register_with_module
from shardwright.tensor_parallel.scope import set_tensor_parallelism, tensor_parallelism
from shardwright.topology.accessors import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from shardwright.topology.context import init, is_initialized, shutdown
from shardwright.transport.objects import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)

__all__ = [
    "CommGroup",
    "DP_GROUP",
    "DistributedModel",
    "DistributedOptimizer",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "RankType",
    "StepOutput",
    "TP_GROUP",
    "WORLD",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "clip_grad_norm",
    "debugging",
    "delay_param_initialization",
    "delayed_param_initialization",
    "delayed_parameter_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "dynamic_shapes",
    "export_huggingface",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_partition",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "hvd_average_grads",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "patches",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "prepare_background_save",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_parameter",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "save_on_signal",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "sharded_data_parallel_checkpoint",
    "shutdown",
    "size",
    "state",
    "state_mod",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "utils",
]


# The original's documents spell this one in three ways.
delayed_param_initialization = delay_param_initialization
delayed_parameter_initialization = delay_param_initialization

_emulation.begin()
_output_capture.install()
_registry.register_finder(_families.find)
_registry.register_planner(_plan.find)
_trainer.install()
