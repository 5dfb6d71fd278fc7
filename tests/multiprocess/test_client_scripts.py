"""What scripts for the original do between the wrap and the last save, one function for each family of scripts.

Each is a script in small: it uses names, positions and orders of calls as such scripts do, through the original import.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

import hf_models
import smdistributed.modelparallel.torch as smp
from client_optimizers import ClientFP16Optimizer
from client_steps import BATCH, LENGTH, QUIET, REPLICAS, SLICES, STAGES, agreed, causal_step, ids
from harness import RankPool


def plain_losses(model: nn.Module, num_steps: int, lr: float = 0.1) -> list[float]:
    """Losses of SGD on one process, and the model trained in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids(step), attention_mask=torch.ones(BATCH, LENGTH), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- GPT-2 with blocks of its own choice and its own half precision ---------------------------------------------------

OLD_CONFIG = {
    "ddp": True, "microbatches": 2, "active_microbatches": 2, "checkpoint_attentions": False,
    "shard_optimizer_state": False, "prescaled_batch": True, "_match_weights": False, "offload_activations": False,
    "optimize": "speed", "placement_strategy": "cluster", "activation_loading_horizon": 4, "skip_tracing": False,
    "auto_partition": True, "default_partition": 0, "_fp32_grad_accumulation": False, "static_mode": True, "fast_mode": False,
}  # fmt: skip


class FP16Module(nn.Module):
    """A script's own wrapper around the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module("module", module.half())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@smp.step
def half_step(model: Any, optimizer: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"].float()
    optimizer.backward(loss, update_master_grads=False)
    return loss


def gpt2_custom(folder: str) -> list[float]:
    from smdistributed.modelparallel.torch.nn import DistributedTransformerLayer
    from smdistributed.modelparallel.torch.nn.huggingface import gpt2
    from smdistributed.modelparallel.torch.state_mod import state as smp_state
    from smdistributed.modelparallel.torch.utils import get_distribution_axis
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = hf_models.make("gpt2")
    smp.init()  # as importing the Trainer's arguments does
    smp.init(OLD_CONFIG)
    assert smp.num_microbatches() == 2
    sliced = smp.tp_size() > 1
    if sliced:  # marked first, registered after
        smp.set_tensor_parallelism(model.transformer.h, True)
        smp.tp_register_with_module(GPT2Block, DistributedTransformerLayer, *gpt2.get_hf_gpt2_transformer_layer_hooks())
    model = smp.DistributedModel(FP16Module(model), trace_device="gpu", backward_passes_per_step=1)
    inner = model.module.module.module
    assert isinstance(inner, type(hf_models.make("gpt2")))
    layers = inner.transformer.h
    assert not sliced or all(isinstance(layer, DistributedTransformerLayer) for layer in layers)
    for i, layer in enumerate(layers):
        smp.set_partition(layer, i * smp.pp_size() // len(layers))
        smp.set_activation_checkpointing(layer)
    made = ClientFP16Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, 2.0**6, agreed)
    optimizer = smp.DistributedOptimizer(
        made, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 1000}
    )
    assert isinstance(optimizer, ClientFP16Optimizer)
    model.register_post_step_hook(lambda model, optimizer: optimizer.init_master_params())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)
    losses = []
    for step in range(3):
        optimizer.zero_grad(set_grads_to_None=True)
        loss = half_step(model, optimizer, ids(step), torch.ones(BATCH, LENGTH))
        optimizer.update_master_grads()
        optimizer.step()
        schedule.step()
        losses.append(loss.reduce_mean().item())
    # What the masters of this rank are called, and those of the other ranks of its slices.
    optimizer.local_state_dict()
    names = smp_state.param_index_to_name_tp_group
    indices = smp_state.param_name_to_index_tp_group
    assert len(names) == len(indices) == smp.tp_size()
    local = dict(model.local_named_parameters())
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(names[smp.tp_rank()]) == list(range(len(masters)))
    mine = {}
    for index, name in names[smp.tp_rank()].items():
        assert indices[smp.tp_rank()][name] == index
        assert masters[index].shape == local[name].shape
        mine[name] = masters[index].detach()
    everyone = smp.allgather(mine, smp.TP_GROUP)
    whole = {}
    for name, value in mine.items():
        axis = get_distribution_axis(local[name])
        parts = [values[name] for values in everyone]
        whole[name] = value if axis is None else torch.cat(parts, axis)
    all_stages = {name: value for part in smp.allgather(whole, smp.PP_GROUP) for name, value in part.items()}
    # The file of each rank, which scripts open by hand.
    content = {"optimizer": optimizer.local_state_dict(gather_if_shard=False), "model": model.local_state_dict()}
    smp.save(content, f"{folder}/half.pt", partial=True, v3=True)
    by_hand = torch.load(f"{folder}/half.pt_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}")
    assert by_hand["model"]["_smp_is_partial"]
    assert all(torch.equal(by_hand["model"][name], value) for name, value in local.items())
    model.load_state_dict(by_hand["model"], same_partition_load=True)
    # The whole model for transformers, on one rank.
    full = model.state_dict(gather_to_rank0=True)
    assert bool(full) == (smp.rank() == 0)
    smp.save({"model": full}, f"{folder}/full.pt", partial=False, v3=True)
    smp.barrier()
    if smp.rank() == 0:
        saved = torch.load(f"{folder}/full.pt")["model"]
        assert all(torch.equal(saved[name], value.half()) for name, value in all_stages.items())
        stripped = {name.removeprefix("module."): value for name, value in saved.items()}
        if sliced:
            stripped = gpt2.translate_layer_state_dict_to_hf_gpt2_block(stripped, 16)
        again = hf_models.make("gpt2").half()
        again.load_state_dict(stripped, strict=True)
    return losses


@pytest.mark.parametrize("degrees", [{"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}], ids=["pp2", "tp2"])
def test_gpt2_custom(pool2: RankPool, tmp_path: Path, degrees: dict[str, int]) -> None:
    plain = hf_models.make("gpt2")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for step in range(3):
        optimizer.zero_grad()
        loss = plain(input_ids=ids(step), attention_mask=torch.ones(BATCH, LENGTH), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    environment = {"SM_HP_MP_PARAMETERS": json.dumps({**degrees, "ddp": True, **QUIET})}
    for losses in pool2.run(gpt2_custom, str(tmp_path), environment=environment, timeout_s=240):
        assert losses == pytest.approx(wanted, rel=5e-3)  # half precision
    endings = {"half.pt_0_0_0", "half.pt_1_0_0" if "pipeline_parallel_degree" in degrees else "half.pt_0_1_0"}
    assert endings <= {path.name for path in tmp_path.iterdir()}


# -- NeoX, Falcon and T5 on stages ----------------------------------------------------------------------------------


def neox(model: Any) -> None:
    smp.set_activation_checkpointing(model.get_module().gpt_neox.layers, strategy="each")


def falcon(model: Any) -> None:
    for layer in model.get_module().transformer.h:
        for part in (layer.self_attention, layer.input_layernorm, layer.mlp):
            smp.set_activation_checkpointing(part)


def t5(model: Any) -> None:
    inner = model.get_module()
    for block in [*inner.encoder.block, *inner.decoder.block]:
        smp.set_activation_checkpointing(block)


def family(name: str) -> nn.Module:
    if name == "falcon":
        from transformers import FalconConfig, FalconForCausalLM

        config = FalconConfig(
            vocab_size=hf_models.VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
            bos_token_id=0, eos_token_id=2, use_cache=False, attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        return FalconForCausalLM(config)
    return hf_models.make(name)


def trained_family(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = family(name)
    if name == "gptneox":
        model.gpt_neox.config.hidden_act = "gelu"
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    {"gptneox": neox, "falcon": falcon, "t5": t5}[name](model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        if smp.pp_rank() == 0:
            batch = ids(step), torch.ones(BATCH, LENGTH)
        else:
            batch = torch.empty(BATCH, 0), torch.empty(BATCH, 0)
        losses.append(causal_step(model, *batch).reduce_mean().item())
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("name", ["gptneox", "falcon", pytest.param("t5", marks=pytest.mark.heavy)])
def test_families_on_stages(pool2: RankPool, name: str) -> None:
    plain = family(name)
    wanted = plain_losses(plain, 2)
    for losses, weights in pool2.run(trained_family, name, config=STAGES, timeout_s=240):
        assert losses == pytest.approx(wanted, rel=1e-5)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


# -- ViT encoder with hooks of the script's own ---------------------------------------------------------------------


def vit_hooks() -> tuple[Any, Any, Any]:
    def init_hook(config: Any) -> Any:
        options = {
            "num_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "attention_head_size": config.hidden_size // config.num_attention_heads,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "attention_dropout_prob": config.attention_probs_dropout_prob,
            "hidden_dropout_prob": config.hidden_dropout_prob,
            "activation": "gelu",
            "layernorm_epsilon": config.layer_norm_eps,
            "initializer_range": config.initializer_range,
            "use_normal_initialization": True,
            "causal_mask_size": None,
            "add_cross_attention": False,
            "pre_layernorm": True,
            "post_layernorm": False,
            "scale_attention_scores": True,
        }
        return (), options

    def forward_hook(hidden_states: Tensor, head_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.float16 if smp.state.cfg.fp16 else hidden_states.dtype
        shape = (hidden_states.shape[0], 1, 1, hidden_states.shape[1])
        mask = torch.zeros(shape, dtype=dtype, device=hidden_states.device)
        return ((hidden_states, mask),), {}

    def return_hook(outputs: Any) -> Any:
        return BaseModelOutput(last_hidden_state=outputs[0])

    return init_hook, forward_hook, return_hook


class Encoder(nn.Module):
    """As the encoder of a ViT is called and built: from a configuration, with outputs in an object."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_hidden_layers))

    def forward(self, hidden_states: Tensor, head_mask: Any = None, **kwargs: Any) -> Any:
        raise AssertionError("is replaced")


class Classifier(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = nn.Linear(3 * 4, config.hidden_size)
        self.encoder = Encoder(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        patches = nn.functional.unfold(pixel_values, 2, stride=2).transpose(1, 2)
        outputs = self.encoder(self.embeddings(patches), head_mask=None)
        logits = self.classifier(outputs.last_hidden_state.mean(1))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@smp.step
def image_step(model: Any, pixel_values: Tensor, labels: Tensor) -> Any:
    output = model(pixel_values=pixel_values, labels=labels)
    model.backward(output["loss"])
    return output


def vit() -> list[float]:
    config = hf_models.make("vit").config
    model = Classifier(config)
    smp.tp_register_with_module(Encoder, smp.nn.DistributedTransformer, *vit_hooks())
    smp.set_tensor_parallelism(model.encoder)
    torch.manual_seed(1 + smp.tp_rank())
    model = smp.DistributedModel(model)
    assert isinstance(model.get_module().encoder, smp.nn.DistributedTransformer)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    images = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        output = image_step(model, images, torch.arange(BATCH) % 3)
        assert isinstance(output, SequenceClassifierOutput)
        assert list(output) == ["loss", "logits"]
        assert output.logits.detach().concat().cpu().shape == (BATCH, 3)
        optimizer.step()
        losses.append(output["loss"].reduce_mean().item())
    with pytest.raises(TypeError):
        iter(output.loss)
    return losses


def test_vit_with_hooks_of_the_script(pool2: RankPool) -> None:
    one, other = pool2.run(vit, config=SLICES, timeout_s=240)
    assert one == other
    assert one[-1] < 0.5 * one[0]


# -- A language model that grows after it was marked ------------------------------------------------------------------


def run_clm() -> Any:
    model = hf_models.make("gpt2")
    smp.set_tensor_parallelism(model)
    torch.manual_seed(0)
    model.resize_token_embeddings(hf_models.VOCABULARY + 6)
    plain = copy.deepcopy(model)
    model = smp.DistributedModel(model)
    assert isinstance(model.get_module(), smp.nn.DistributedTransformerLMHead)
    ours = [causal_step(model, ids(0), torch.ones(BATCH, LENGTH)).reduce_mean().item()]
    return ours, plain_losses(plain, 1)


def test_embeddings_grow_after_marking(pool2: RankPool) -> None:
    for ours, wanted in pool2.run(run_clm, config=SLICES, timeout_s=240):
        assert ours == pytest.approx(wanted, rel=1e-5)


# -- Small things that scripts ask for ----------------------------------------------------------------------------------


def should_record() -> tuple[list[int], bool]:
    return smp.get_tp_group(), smp.pp_rank() == 0 and 0 in smp.get_tp_group()


def test_the_tensor_parallel_group_is_a_list_of_ranks(pool4: RankPool) -> None:
    told = pool4.run(should_record, config={**STAGES, "tensor_parallel_degree": 2, "ddp": True, "placement_strategy": "PDT"})
    assert told == [([0, 1], True), ([0, 1], True), ([2, 3], False), ([2, 3], False)]


def average_again() -> None:
    model = smp.DistributedModel(hf_models.make("gpt2"))
    causal_step(model, ids(smp.rank()), torch.ones(BATCH, LENGTH))
    for p in model.parameters():
        p.grad.mul_(smp.rank() + 1)  # so that another mean would show
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    smp.hvd_average_grads()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_averaging_on_request_does_nothing_with_ddp(pool2: RankPool) -> None:
    pool2.run(average_again, config=REPLICAS)
