"""Recomputed activations change no number, in any layout, and keep less."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import reference
from harness import RankFailure, RankPool

STEPS = 2
BATCH = 8
DROPOUT = 0.2

# ------------------------------------------------------------------ models of these tests


class ConvNet(nn.Module):
    """FF-31: four blocks of Conv and BatchNorm, and a counter of calls in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(3 * 64, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).flatten(1))


class Tuples(nn.Module):
    """A Sequential whose layers take and return tuples, None among them, and use dropout."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, both: tuple[Tensor, None, Tensor]) -> tuple[Tensor, None, Tensor]:
            h, nothing, scale = both
            return nn.functional.dropout(torch.tanh(self.linear(h)), 0.2) * scale, nothing, scale

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[self.Layer() for _ in range(5)])
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        h, _, scale = self.run((x, None, x.abs().mean(1, keepdim=True)))
        return self.head(h * scale)

    def run(self, value: Any) -> Any:
        return self.layers(value)


class Called(Tuples):
    """Asks for it itself, by the call form."""

    def run(self, value: Any) -> Any:
        import shardwright.torch as smp

        return smp.patches.checkpoint.checkpoint_sequential(self.layers, value, strategy="group_2", pack_args_as_tuple=True)


OWN: dict[str, tuple[Callable[[], nn.Module], models.MakeBatch]] = {
    "conv": (ConvNet, models.image_batch),
    "tuples": (Tuples, models.vector_batch),
    "called": (Called, models.vector_batch),
}


@dataclass(frozen=True)
class Case:
    """marked: what to mark in the wrapped model, "" for nothing.   stages: names -> stage, for a partition by hand."""

    model: str
    marked: str
    strategy: str = "each"
    pp: int = 1
    tp: int = 1
    microbatches: int = 2
    stages: tuple[tuple[str, int], ...] = ()
    before: bool = False
    hooked: bool = False
    autocast: bool = False
    offload: bool = False

    @property
    def title(self) -> str:
        flags = [f for f in ("before", "hooked", "autocast", "offload") if getattr(self, f)]
        return "-".join([self.model, self.marked or "none", self.strategy, f"pp{self.pp}", f"tp{self.tp}", *flags])

    def config(self) -> dict[str, Any]:
        return {
            "pipeline_parallel_degree": self.pp, "tensor_parallel_degree": self.tp, "ddp": True,
            "microbatches": self.microbatches, "auto_partition": not self.stages, "offload_activations": self.offload,
            "log_level": "warning",
        }  # fmt: skip


@dataclass
class Seen:
    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Any]
    saved: int


def build(case: Case) -> tuple[nn.Module, models.MakeBatch, models.LossOf]:
    if case.model not in OWN:
        made = models.make(case.model, dropout=DROPOUT)
        return made.model, made.make_batch, made.loss_of
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OWN[case.model][0](), OWN[case.model][1], models.classification_loss


def train(case: Case) -> Seen:
    """Two steps on this rank, and how many bytes autograd saved during the first forward on this rank."""
    import shardwright.torch as smp

    plain, make_batch, loss_of = build(case)
    smp.set_tensor_parallelism(plain, case.tp > 1)
    for name, stage in case.stages:
        smp.set_partition(plain.get_submodule(name), stage)
    if case.before and case.marked:
        smp.set_activation_checkpointing(plain.get_submodule(case.marked), strategy=case.strategy)
    model = smp.DistributedModel(plain)
    if case.marked and not case.before:
        smp.set_activation_checkpointing(model.get_module().get_submodule(case.marked), strategy=case.strategy)
    if case.hooked:
        for module in model.get_module().modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda m, args, out: out * 1.5)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))
    saved: dict[tuple[int, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.dtype.is_floating_point:
            saved.setdefault((tensor.untyped_storage().data_ptr(), tensor._version), tensor.untyped_storage().nbytes())
        return tensor

    @smp.step
    def train_step(model: nn.Module, batch: models.Batch) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    seen = Seen([], [], {}, 0)
    torch.manual_seed(11)
    for step in range(STEPS):
        batch = make_batch(10 * step + smp.dp_rank(), BATCH)
        optimizer.zero_grad(set_to_none=True)
        saved.clear()
        seen.losses.append(train_step(model, batch).stack())
        seen.gradients.append(
            {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.local_named_parameters()}
        )
        optimizer.step()
    seen.saved = sum(saved.values())
    seen.state = {n: t.clone() for n, t in model.local_state_dict().items() if isinstance(t, Tensor)}
    return seen


def same(left: Any, right: Any) -> list[str]:
    """What differs, bit for bit."""
    found = []
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        found += [f"rank {rank}: loss {s}" for s in range(STEPS) if not torch.equal(a.losses[s], b.losses[s])]
        assert a.state.keys() == b.state.keys()
        for step, (one, two) in enumerate(zip(a.gradients, b.gradients, strict=True)):
            found += [
                f"rank {rank}: gradient {n} of step {step}" for n in one
                if not (one[n] is two[n] is None or torch.equal(one[n], two[n]))  # type: ignore[arg-type]
            ]  # fmt: skip
        found += [f"rank {rank}: {n}" for n in a.state if not torch.equal(a.state[n], b.state[n])]
    return found


BY_HAND = (("transformer.wte", 0), ("transformer.h.0", 0), ("transformer.h.1", 0), ("transformer.h.2", 1), ("transformer.h.3", 1))
QUICK = [
    Case("gpt2", "transformer.h", pp=2),
    Case("gpt2", "transformer.h", before=True, offload=True),
    Case("gpt2", "transformer.seq_layers", "contiguous", tp=2),
    Case("tuples", "layers", "group_2", pp=2),
    Case("conv", "blocks", pp=2, microbatches=4),
    Case("called", "", pp=2),
]
HEAVY = [
    Case("gpt2", "transformer.h", pp=2, stages=BY_HAND, before=True),
    Case("gpt2", "transformer.h", pp=2, autocast=True),
    Case("gpt2", "transformer", tp=2),
    Case("llama", "model.layers", pp=2, autocast=True),
    Case("t5", "encoder.block", pp=2),
    Case("t5", "decoder.block", tp=1),
    Case("bert", "bert.encoder.layer", pp=2),
    Case("gpt2", "transformer.seq_layers", "group_2", pp=2, tp=2),
    Case("llama", "transformer.seq_layers", "each", tp=2),
    Case("mixtral", "model.layers", pp=2),
    Case("tuples", "layers", "contiguous", pp=2),
    Case("tuples", "layers", "group_3"),
    Case("conv", "blocks", "contiguous", pp=2, microbatches=4),
    Case("conv", "blocks", "each", pp=2, microbatches=4, hooked=True),
    Case("conv", "blocks", "group_2"),
    Case("called", ""),
]


def _params() -> list[Any]:
    heavy = [pytest.param(c, id=c.title, marks=pytest.mark.heavy) for c in HEAVY]
    return [*(pytest.param(c, id=c.title) for c in QUICK), *heavy]


@pytest.mark.parametrize("case", _params())
def test_numbers_are_the_same(case: Case, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue("pool4" if case.pp * case.tp > 2 else "pool2")
    plain = replace(case, marked="", model="tuples" if case.model == "called" else case.model)
    want = pool.run(train, plain, config=plain.config(), timeout_s=120)
    got = pool.run(train, case, config=case.config(), timeout_s=120)
    assert same(got, want) == []
    assert sum(s.saved for s in got) < sum(s.saved for s in want)


# ------------------------------------------------------------------ batch norm (FF-31)


def normed(marked: bool, steps: int) -> dict[str, Tensor]:
    """Train, then run one step without gradients in eval mode; buffers before and after that."""
    import shardwright.torch as smp

    plain, make_batch, loss_of = build(Case("conv", ""))
    if marked:
        smp.set_activation_checkpointing(plain.blocks)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        if model.training:
            model.backward(loss)
        return loss

    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        step(model, make_batch(number, BATCH))
        optimizer.step()
    buffers = reference.copies(dict(model.local_named_buffers()))
    model.eval()
    with torch.no_grad():
        step(model, make_batch(0, BATCH))
    after = dict(model.local_named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in buffers.items())
    return buffers


@pytest.mark.parametrize("marked", [False, True])
def test_statistics_move_once_for_each_microbatch(marked: bool, pool2: RankPool) -> None:
    steps, count = 3, 4
    runs = pool2.run(normed, marked, steps, config={"pipeline_parallel_degree": 2, "microbatches": count})
    got = {name: buffer for run in runs for name, buffer in run.items()}
    plain, make_batch, loss_of = build(Case("conv", ""))
    data = [[make_batch(number, BATCH)] for number in range(steps)]
    want = reference.run_reference(plain, loss_of, data, num_microbatches=count).buffers
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert {int(b) for name, b in got.items() if name.endswith("num_batches_tracked")} == {steps * count}


# ------------------------------------------------------------------ transformers' own, and how much memory


def own_checkpointing(on: bool) -> Seen:
    """transformers' `gradient_checkpointing_enable`, with dropout, over whatever the configuration says."""
    original = models.make

    def enabled(*args: Any, **kwargs: Any) -> models.Made:
        made = original(*args, **kwargs)
        if on:
            made.model.gradient_checkpointing_enable()
        made.model.train()
        return made

    models.make = enabled
    try:
        return train(Case("gpt2", "", pp=2))
    finally:
        models.make = original


def test_transformers_own_checkpointing(pool2: RankPool) -> None:
    config = Case("gpt2", "", pp=2).config()
    want, got = (pool2.run(own_checkpointing, on, config=config, timeout_s=120) for on in (False, True))
    assert same(got, want) == []
    assert sum(s.saved for s in got) < sum(s.saved for s in want)


BLOCKS, WIDTH, ROWS = 12, 16, 512


class Live(TorchDispatchMode):
    """Bytes of the storages that ops make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given | self._known.keys():
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, nbytes = id(storage), storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            self.now -= nbytes
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)


def peaks(strategy: str) -> int:
    """The most bytes of activations and their gradients that live at one time in a step on this rank."""
    import shardwright.torch as smp

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    plain = nn.Sequential(*[block() for _ in range(BLOCKS)])
    if strategy:
        smp.set_activation_checkpointing(plain, strategy=strategy)
    model = smp.DistributedModel(plain)
    live = Live()

    @smp.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(ROWS, WIDTH))
    with live:
        step(model, torch.ones(ROWS, WIDTH))
    return live.peak


@pytest.mark.parametrize(("strategy", "inputs", "at_once"), [("each", BLOCKS, 1), ("group_3", BLOCKS // 3, 3)])
def test_peak_memory_falls_as_computed(strategy: str, inputs: int, at_once: int, pool2: RankPool) -> None:
    row = 4 * ROWS * WIDTH
    kept = BLOCKS * (1 + 4 + 4) * row  # each block's input, and what GELU and its second layer keep
    then = (inputs + at_once * (1 + 4 + 4)) * row  # inputs, and the blocks that are recomputed together
    config = {"log_level": "warning", "ddp": True}
    plain, marked = (pool2.run(peaks, s, config=config)[0] for s in ("", strategy))
    grads = 2 * 4 * row  # of what GELU takes and gives, at one time
    assert kept <= plain <= kept + grads + 3 * row
    assert then - row <= marked <= then + grads + 3 * row


# ------------------------------------------------------------------ modules on several stages


def straddle(by_hand: bool) -> list[str]:
    """Mark a module that lies on both stages; returns what was logged."""
    import logging

    import shardwright.torch as smp

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright.engine.recomputation").addHandler(handler)
    plain, make_batch, loss_of = models.make("mlp")
    if by_hand:
        for index in range(6):
            smp.set_partition(plain.blocks[index], index // 3)
    outer = nn.Sequential(plain)  # the root itself would lie on stage 0 and others, too
    model = smp.DistributedModel(outer)
    smp.set_activation_checkpointing(outer[0])
    smp.set_activation_checkpointing(plain.blocks[1])

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    for number in range(2):
        step(model, make_batch(number, BATCH))
    handler.close()
    return [line for line in logged if "several stages" in line]


def test_module_on_several_stages_is_left_out_with_one_warning(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    logged = pool2.run(straddle, False, config=config)
    assert [len(lines) for lines in logged] == [1, 0]
    assert "'0' (Mlp) on stages 0, 1" in logged[0][0]


def test_module_on_several_stages_by_hand_is_an_error_on_every_rank(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False}
    with pytest.raises(RankFailure) as failure:
        pool2.run(straddle, True, config=config)
    assert sorted(failure.value.tracebacks) == [0, 1]
    for text in failure.value.tracebacks.values():
        assert "PartitionError" in text
        assert "'0' (Mlp) on stages 0, 1" in text


def gathered() -> float:
    """Groups on both stages, then `model.cpu()`: the whole model runs on every rank."""
    import shardwright.torch as smp

    plain, make_batch, loss_of = build(Case("tuples", ""))
    smp.set_activation_checkpointing(plain.layers, strategy="group_2")
    model = smp.DistributedModel(plain)

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        return loss_of(model, batch)

    with torch.no_grad():
        step(model, make_batch(0, BATCH))
        model.cpu()
        torch.manual_seed(1)
        return float(loss_of(model, make_batch(0, BATCH)))


def test_gathered_model_runs_everywhere(pool2: RankPool) -> None:
    losses = pool2.run(gathered, config={"pipeline_parallel_degree": 2, "microbatches": 2})
    plain, make_batch, loss_of = build(Case("tuples", ""))
    torch.manual_seed(1)
    assert losses == [loss_of(plain, make_batch(0, BATCH)).item()] * 2


def warned(mark: bool) -> list[str]:
    import logging

    import shardwright.torch as smp
    from shardwright import log

    log._seen.clear()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwright.engine.recomputation")
    logger.addHandler(handler)
    model = smp.DistributedModel(models.make("mlp").model)
    if mark:
        smp.set_activation_checkpointing(model.get_module().blocks)

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        return models.classification_loss(model, batch)

    with torch.no_grad():
        step(model, models.vector_batch(0, BATCH))
        step(model, models.vector_batch(0, BATCH))
    logger.removeHandler(handler)
    return logged


@pytest.mark.parametrize("mark", [True, False])
def test_offloading_says_once_where_it_does_nothing(mark: bool, pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "offload_activations": True}
    logged = pool2.run(warned, mark, config=config)
    assert [("on a CPU" in line, "no module is checkpointed" in line) for line in logged[0]] == [
        (True, False), *([] if mark else [(False, True)])
    ]  # fmt: skip
    assert logged[1] == []


# ------------------------------------------------------------------ names (FF-33)


def save_marked(folder: str, marked: list[int], partial: bool) -> dict[str, Any]:
    import shardwright.torch as smp

    model, optimizer, step = _gpt2(smp, marked)
    step(model, models.causal_batch(0, BATCH)), optimizer.step()
    smp.save_checkpoint(folder, tag="one", partial=partial, model=model, optimizer=optimizer)
    return _next_step(step, model, optimizer)


def resume_marked(folder: str, marked: list[int], partial: bool) -> dict[str, Any]:
    import shardwright.torch as smp

    model, optimizer, step = _gpt2(smp, marked)
    smp.resume_from_checkpoint(folder, tag="one", partial=partial)
    return _next_step(step, model, optimizer)


def _gpt2(smp: Any, marked: list[int]) -> Any:
    """Blocks 1 and 2 are recomputed by torch's own wrapper, whose names are longer, if they are."""
    plain, _, loss_of = models.make("gpt2")
    for index in marked:
        if index in (1, 2):
            plain.transformer.h[index] = checkpoint_wrapper(plain.transformer.h[index])
        else:
            smp.set_activation_checkpointing(plain.transformer.h[index])
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    return model, optimizer, step


def _next_step(step: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    optimizer.zero_grad(set_to_none=True)
    loss = step(model, models.causal_batch(1, BATCH)).stack()
    optimizer.step()
    state = {n: t.clone() for n, t in model.local_state_dict().items() if isinstance(t, Tensor)}
    return {"loss": loss, **state}


def _check_names(folder: Path, partial: bool) -> None:
    """The files have the plain model's names, those of weights and those of moments."""
    plain = models.make("gpt2").model
    weights = sorted(folder.glob("one_partial/model_*")) if partial else [folder / "one"]
    states = sorted(folder.glob("one_partial/optimizer_*")) if partial else [folder / "optimizer_one"]
    held = [name for file in weights for name in torch.load(file, weights_only=True) if name != "_smp_is_partial"]
    updated = [name for file in states for name in torch.load(file, weights_only=True)["param_names"]]
    assert sorted(held) == sorted(plain.state_dict())
    assert sorted(updated) == sorted(name for name, _ in plain.named_parameters())


@pytest.mark.parametrize("partial", [True, False])
def test_names_do_not_depend_on_marks(partial: bool, pool2: RankPool, tmp_path: Any) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "log_level": "warning"}
    for first, then in (([1, 3], []), ([1, 3], [0, 1, 2, 3]), ([], [1, 3])):
        folder = str(tmp_path / f"{first}-{then}")
        want = pool2.run(save_marked, folder, first, partial, config=config)
        _check_names(Path(folder), partial)
        got = pool2.run(resume_marked, folder, then, partial, config=config)
        for a, b in zip(got, want, strict=True):
            assert a.keys() == b.keys()
            assert [n for n in a if not torch.equal(a[n], b[n])] == []
