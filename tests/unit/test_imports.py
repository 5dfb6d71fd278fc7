"""Every import line that scripts of the original use works in a fresh interpreter, without side effects.

A fresh interpreter takes seconds to load PyTorch, so each runs a group of lines.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
FAMILIES = ("gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta")

QUIET = """
import sys, torch
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
"""

PACKAGE = """
import importlib.util
spec = importlib.util.find_spec("smdistributed")
assert spec is not None and spec.origin is not None and spec.origin.endswith("__init__.py")
import smdistributed.modelparallel
from smdistributed.modelparallel import __version__ as SMP_VERSION
from packaging import version
assert SMP_VERSION == "1.15.0" == smdistributed.modelparallel.__version__
assert version.parse(SMP_VERSION) >= version.parse("1.15")
import shardwright
assert smdistributed.modelparallel.shardwright_version == shardwright.__version__
assert smdistributed.modelparallel.__file__.endswith("__init__.py")
import sys
assert "torch" not in sys.modules
"""

SUBMODULES_FIRST = f"""
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg
from smdistributed.modelparallel.torch.nn import FusedLayerNorm, DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn import (
    DistributedAttentionLayer, DistributedEmbedding, DistributedLinear, DistributedModule,
    DistributedTransformer, DistributedTransformerLMHead, DistributedTransformerOutputLayer,
    FlashAttentionLayer,
)
from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedLamb, FusedNovoGrad
from smdistributed.modelparallel.torch.nn.huggingface import {", ".join(FAMILIES)}
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks, translate_hf_block_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed, translate_hf_state_dict_to_smdistributed_gpt2,
    translate_layer_state_dict_to_hf_gpt2_block, translate_state_dict_to_hf_gpt2,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptj import (
    translate_hf_gptj_state_dict_to_smdistributed, translate_hf_gptj_state_dict_to_smdistributed_gptj,
    translate_hf_state_dict_to_smdistributed_gptj, translate_state_dict_to_hf_gptj,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptneo import (
    translate_hf_gptneo_state_dict_to_smdistributed, translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptneox import translate_state_dict_to_hf_gptneox
from smdistributed.modelparallel.torch.nn.huggingface.bert import translate_state_dict_to_hf_bert
from smdistributed.modelparallel.torch.nn.huggingface.roberta import translate_state_dict_to_hf_roberta
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from smdistributed.modelparallel.torch.amp import GradScaler
{QUIET}
"""

ATTRIBUTES = f"""
import importlib, sys
import smdistributed.modelparallel.torch as smp
smp.amp.GradScaler, smp.model, smp.nn.FusedLayerNorm, smp.optimizers.FusedLAMB, smp.step
smp.patches.checkpoint.checkpoint, smp.patches.checkpoint.checkpoint_sequential
smp.sharded_data_parallel_checkpoint.get_param_shapes, smp.sharded_data_parallel_checkpoint.get_buffer_names
smp.state.module_manager.translate_functions
for family in {FAMILIES!r}:
    getattr(smp.nn.huggingface, family)

import shardwright.torch
assert smp is shardwright.torch
ours = {{name for name in sys.modules if f"{{name}}.".startswith("shardwright.torch.")}}
for name in ours:
    alias = "smdistributed.modelparallel.torch" + name.removeprefix("shardwright.torch")
    assert sys.modules[alias] is sys.modules[name], name
    assert importlib.import_module(alias) is sys.modules[name], name
import smdistributed.modelparallel.test.torch.utils as debugging
assert debugging is smp.debugging
import smdistributed.modelparallel.torch.nn.huggingface.gpt2 as gpt2
assert gpt2 is smp.nn.huggingface.gpt2
missing = {{path for path in {{modules!r}} if path not in ours}}
assert not missing, f"not loaded with the package, so they could be loaded twice: {{missing}}"
{QUIET}
"""

TENSORFLOW = """
try:
    import smdistributed.modelparallel.tensorflow as smp
except ImportError as error:
    assert "PyTorch" in str(error)
else:
    raise AssertionError("imported")
"""

STEP_CLASSES = f"""
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.step import StepOutput
from smdistributed.modelparallel.torch.model import DistributedModel
assert smp.StepOutput is StepOutput
assert smp.model.DistributedModel is smp.DistributedModel is DistributedModel
assert callable(smp.step), smp.step
import smdistributed.modelparallel.torch.step
assert callable(smp.step), smp.step
{QUIET}
"""


def modules_of_the_face() -> list[str]:
    paths = (SRC / "shardwright" / "torch").rglob("*.py")
    return [".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def run(program: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SM_")}
    environment.update(PYTHONPATH=str(SRC), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", program],
        check=True,
        timeout=120,
        env=environment,
    )


def test_package_without_torch() -> None:
    run(PACKAGE)


def test_submodules_in_scripts_that_import_nothing_else_first() -> None:
    run(SUBMODULES_FIRST)


def test_everything_is_an_attribute_and_the_same_object() -> None:
    run(ATTRIBUTES.replace("{modules!r}", repr(modules_of_the_face())))


def test_tensorflow_says_that_it_is_not_there() -> None:
    run(TENSORFLOW)


@pytest.mark.skipif(
    importlib.util.find_spec("shardwright.pipeline.step") is None, reason="needs shardwright.pipeline.step"
)
def test_step_stays_the_decorator() -> None:
    run(STEP_CLASSES)
