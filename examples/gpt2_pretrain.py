"""Pre-train a GPT-2, the way training scripts of large models do.

    python examples/gpt2_pretrain.py
    shardwright run --pp 2 examples/gpt2_pretrain.py --manual_partition 1
    shardwright run --tp 2 examples/gpt2_pretrain.py
    shardwright run --pp 2 --tp 2 examples/gpt2_pretrain.py --fp16 1

The model is made inside `smp.model_creation`, so its blocks become distributed ones under `transformer.seq_layers`, also
with one process. They are put on stages by hand, and are recomputed in backward. Only the first stage reads data: the
others have a loader of empty tensors, of the length that the first tells them. All tp ranks read the same batch.
Checkpoints are partial ones on the way (`--load_partial 1` continues) and a full one at the end, which transformers loads
(`--load_full 1` starts from it, in any layout).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

import smdistributed.modelparallel.torch as smp

FULL_TAG = "trained_gpt_full.pt"
NUM_SAMPLES = 240


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Generated token sequences in which the steps from token to token repeat, and their attention masks."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start, *steps = torch.randint(1, 6, (4,), generator=generator).tolist()
        moves = torch.tensor(steps).repeat(self.length // 3 + 1)[: self.length]
        return (start + moves.cumsum(0)) % self.vocabulary, torch.ones(self.length, dtype=torch.long)


class Nothing(Dataset[tuple[Tensor, Tensor]]):
    """What the later stages iterate over: as many samples, without content."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.empty(0), torch.empty(0)


def make_loader(args: argparse.Namespace) -> DataLoader[Any]:
    """Real data on the first stage, empty tensors of the same number on the others."""
    sharers, mine = (smp.rdp_size(), smp.rdp_rank()) if args.prescaled_batch else (smp.dp_size(), smp.dp_rank())
    if smp.pp_rank() == 0:
        data: Dataset[Any] = Sentences(args.vocab_size, args.max_context_width)
        sampler = torch.utils.data.DistributedSampler(data, sharers, mine, shuffle=False, drop_last=True)
        loader = DataLoader(data, args.train_batch_size, sampler=sampler, drop_last=True)
        smp.broadcast(len(loader), smp.PP_GROUP)
        return loader
    num_batches = smp.recv_from(0, smp.RankType.PP_RANK)
    return DataLoader(Nothing(num_batches * args.train_batch_size), args.train_batch_size, drop_last=True)


@smp.step
def train_step(model: smp.DistributedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def manual_partition(num_layers: int) -> list[int]:
    """Stage of each layer: even, and what is left over goes to the last stages, as the first holds the embedding."""
    each, left = divmod(num_layers, smp.pp_size())
    counts = [each + (stage >= smp.pp_size() - left) for stage in range(smp.pp_size())]
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def make_model(args: argparse.Namespace) -> smp.DistributedModel:
    """Create, wrap, put the layers on stages, and mark them to be recomputed."""
    config = GPT2Config(
        vocab_size=args.vocab_size, n_positions=args.max_context_width, n_embd=args.hidden_width,
        n_layer=args.num_layers, n_head=args.num_heads, use_cache=False, bos_token_id=0, eos_token_id=0,
        embd_pdrop=args.embd_pdrop, attn_pdrop=args.attn_pdrop, resid_pdrop=args.resid_pdrop,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    with smp.model_creation(
        tensor_parallelism=True,
        zero_init=False,
        dtype=dtype,
        distribute_embedding=args.sharded_data_parallel_degree > 1 and smp.tp_size() > 1,
        use_alibi=False,
        attention_in_fp32=True,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_bias_gelu=True,
    ):
        model = GPT2LMHeadModel(config)
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    layers = model.get_module().transformer.seq_layers
    if args.manual_partition:
        for layer, stage in zip(layers.children(), manual_partition(args.num_layers), strict=True):
            smp.set_partition(layer, stage)
    if args.activation_checkpointing:
        smp.set_activation_checkpointing(layers, strategy=args.activation_strategy)
    return model


def make_optimizer(args: argparse.Namespace, model: smp.DistributedModel) -> tuple[Any, Any]:
    """AdamW without decay of biases and norms, and a schedule with warm-up."""
    named = list(model.get_module().named_parameters())
    undecayed = [p for n, p in named if n.endswith("bias") or "layernorm" in n]
    decayed = [p for n, p in named if not (n.endswith("bias") or "layernorm" in n)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(groups, lr=args.lr),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return optimizer, schedule


def train(args: argparse.Namespace) -> None:
    model = make_model(args)
    optimizer, schedule = make_optimizer(args, model)
    done = 0
    if args.load_partial or args.load_full:
        tag = None if args.load_partial else FULL_TAG
        content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=tag, partial=bool(args.load_partial))
        done = content.get("total_steps", 0) if args.load_partial else 0
        if args.load_partial:
            schedule.load_state_dict(content["lr_scheduler"])
    model.train()
    for step, (input_ids, attention_mask) in enumerate(make_loader(args)):
        if step < done:
            continue
        if step == args.max_steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, input_ids, attention_mask).reduce_mean()
        optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            schedule.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {loss.item() / smp.dp_size():.6f}", flush=True)
        if (step + 1) % args.checkpoint_freq == 0:
            content = {"cli_args": vars(args), "total_steps": step + 1, "lr_scheduler": schedule.state_dict()}
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"trained_gpt-{step + 1}.pt",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=content,
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    if args.save_final_full_model:
        smp.save_checkpoint(args.checkpoint_dir, tag=FULL_TAG, partial=False, model=model, user_content={"steps": step})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options: dict[str, Any] = {
        "max_steps": 20, "seed": 12345, "train_batch_size": 4, "lr": 5e-3, "grad_clip": 1.0, "fp16": 0, "bf16": 0,
        "vocab_size": 64, "max_context_width": 24, "hidden_width": 48, "num_layers": 5, "num_heads": 4,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "microbatches": 2, "active_microbatches": 2,
        "sharded_data_parallel_degree": 1, "shard_optimizer_state": 0, "prescaled_batch": 1, "offload_activations": 0,
        "activation_loading_horizon": 4, "optimize": "speed", "placement_strategy": "cluster", "skip_tracing": 0,
        "static_mode": 0, "fast_mode": 0, "manual_partition": 0, "activation_checkpointing": 1,
        "activation_strategy": "each", "checkpoint_dir": "gpt2_checkpoints", "checkpoint_freq": 10,
        "num_kept_checkpoints": 2, "load_partial": 0, "load_full": 0, "save_final_full_model": 1,
    }  # fmt: skip
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.fp16 and args.bf16:
        raise SystemExit("choose one of --fp16 1 and --bf16 1")
    transformers_logging.set_verbosity_error()
    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "active_microbatches": args.active_microbatches,
            "shard_optimizer_state": bool(args.shard_optimizer_state),
            "prescaled_batch": bool(args.prescaled_batch),
            "fp16": bool(args.fp16),
            "bf16": bool(args.bf16),
            "offload_activations": bool(args.offload_activations),
            "optimize": args.optimize,
            "placement_strategy": args.placement_strategy,
            "activation_loading_horizon": args.activation_loading_horizon,
            "skip_tracing": bool(args.skip_tracing),
            "auto_partition": not args.manual_partition,
            "default_partition": 0,
            "static_mode": bool(args.static_mode),
            "fast_mode": bool(args.fast_mode),
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        }
    )
    train(args)


if __name__ == "__main__":
    main()
