"""Checkpoints under sharded data parallelism: the same run goes on, and other layouts take it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import reconstruction
import reference
import shardwright.torch as smp
from harness import RankPool
from sdp_ranks import config
from sharded_models import batch, tied_model, train_step, train_steps, two_groups, uneven, wrapped


def saved(path: str) -> list[dict[str, Tensor]]:
    """Tag "one" after two steps; "two" with other weights, of which nothing that neighbours hold is known from a step."""
    model, optimizer = wrapped()
    train_steps(model, optimizer, 0, 2)
    smp.save_checkpoint(path, "one", model=model, optimizer=optimizer)
    first = model.state_dict()
    model.load_state_dict({n: w + 0.5 if w.is_floating_point() else w for n, w in first.items()})
    smp.save_checkpoint(path, "two", model=model, optimizer=optimizer)
    return [first, model.state_dict()]


@pytest.mark.parametrize("kind", [None, "bf16"])
def test_shards_are_merged_without_a_job(pool2: RankPool, tmp_path: Path, kind: str | None) -> None:
    merge = smp.sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint
    first, whole = pool2.run(saved, str(tmp_path), config=config(2, 2, **({kind: True} if kind else {})))[0]
    for merged in (merge(tmp_path), merge(str(tmp_path), tag="two"), merge(tmp_path, tag="two_partial")):
        assert merged.keys() == whole.keys()
        for name, weight in whole.items():
            assert merged[name].dtype is (torch.float32 if weight.is_floating_point() else weight.dtype)
            assert torch.equal(merged[name].to(weight.dtype), weight), name
    check_reconstructed(tmp_path, "one_partial", first)
    check_reconstructed(tmp_path, None, whole)
    if kind:  # masters have more digits
        assert any(not torch.equal(merge(tmp_path, tag="one")[name], weight.float()) for name, weight in first.items())


def check_reconstructed(root: Path, tag: str | None, whole: dict[str, Tensor]) -> None:
    """By the scripts' own means: every trained weight, and every buffer."""
    found = reconstruction.full_state_dict(root, tag)
    assert found.keys() == whole.keys() - {"again.weight"}
    for name, weight in found.items():
        assert torch.equal(weight.to(whole[name].dtype), whole[name]), name


def uninterrupted(path: str, partial: bool) -> dict[str, Tensor]:
    model, optimizer = wrapped()
    train_steps(model, optimizer, 0, 2)
    smp.save_checkpoint(path, "two", partial=partial, model=model, optimizer=optimizer, user_content={"step": 2})
    train_steps(model, optimizer, 2, 4)
    return model.state_dict()  # type: ignore[no-any-return]


def resumed(path: str, partial: bool) -> dict[str, Tensor]:
    model, optimizer = wrapped(seed=1)
    assert smp.resume_from_checkpoint(path, "two", partial=partial)["step"] == 2
    train_steps(model, optimizer, 2, 4)
    return model.state_dict()  # type: ignore[no-any-return]


def scaled(seed: int) -> tuple[Any, Any]:
    model = smp.DistributedModel(uneven(seed))
    inner = two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01))
    scale = {"init_scale": 2.0**10, "scale_window": 2}
    return model, smp.DistributedOptimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=scale)


def saved_both(path: str) -> dict[str, Any]:
    model, optimizer = scaled(0)
    train_steps(model, optimizer, 0, 3)
    for partial in (True, False):
        smp.save_checkpoint(f"{path}/{partial}", "three", partial, model, optimizer, user_content=["no", "dict"])
    return {**optimizer.state_dict(), "scale": optimizer.loss_scale}


def without_moments(path: str, saved: dict[str, Any], early: bool, partial: bool) -> None:
    model, optimizer = scaled(1)
    if not early:
        train_steps(model, optimizer, 0, 1)  # whose moments are not left either
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    content = smp.resume_from_checkpoint(f"{path}/{partial}", partial=partial, load_sharded_optimizer_state=False)
    assert content == ["no", "dict"]
    if early:
        train_step(model, batch(3, 0))  # the model gets its parts
        optimizer.zero_grad()
    found = optimizer.state_dict()
    assert optimizer.loss_scale == saved["scale"] != 2.0**10
    assert not any(value for value in found["state"].values()), "moments begin anew"
    assert [group["lr"] for group in found["param_groups"]] == [0.5, 0.5]
    assert found["fp32_from_fp16"].keys() == saved["fp32_from_fp16"].keys()
    assert all(torch.equal(master, saved["fp32_from_fp16"][i]) for i, master in found["fp32_from_fp16"].items())
    assert any(not torch.equal(master, master.half().float()) for master in found["fp32_from_fp16"].values())
    train_steps(model, optimizer, 3, 4)
    assert all(values["step"] == 1 for values in optimizer.state_dict()["state"].values())


def test_masters_and_the_scale_without_moments(pool2: RankPool, tmp_path: Path) -> None:
    """load_sharded_optimizer_state=False."""
    settings = config(2, 2, fp16=True)
    saved = pool2.run(saved_both, str(tmp_path), config=settings)[0]
    weights = torch.load(tmp_path / "False" / "three", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.float16}, "masters, in the dtype of training"
    for early, partial in ((False, True), (False, False), (True, True)):
        pool2.run(without_moments, str(tmp_path), saved, early, partial, config=settings)


@pytest.mark.parametrize("kind", [None, pytest.param("bf16", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("partial", [True, False])
def test_checkpoints(pool2: RankPool, pool4: RankPool, tmp_path: Path, partial: bool, kind: str | None) -> None:
    """FF-16: uneven sizes; resumed bit for bit at the same layout, and at others with whole shapes everywhere."""
    more = {kind: True} if kind else {}
    path = str(tmp_path)
    whole = pool4.run(uninterrupted, path, partial, config=config(4, 2, **more))[0]
    for run in pool4.run(resumed, path, partial, config=config(4, 2, **more)):
        for name, weight in whole.items():
            assert torch.equal(run[name], weight), name
    if partial:
        folder = tmp_path / "two_partial"
        assert sorted(p.name for p in folder.glob("optimizer_*")) == [f"optimizer_{s}.pt" for s in range(4)]
    else:
        check_plain_shapes(tmp_path)
    for pool, degree in ((pool4, 2), (pool2, 2), (pool2, 1)):
        for run in pool.run(resumed, path, partial, config=config(degree, 2, **more)):
            for name, weight in whole.items():
                torch.testing.assert_close(run[name], weight, rtol=1e-5 if kind is None else 1e-2, atol=1e-6 if kind is None else 1e-3)


def check_plain_shapes(root: Path) -> None:
    """A full checkpoint holds whole tensors without padding, of the model and of the optimizer."""
    plain = tied_model()
    shapes = {name: weight.shape for name, weight in plain.state_dict().items()}
    assert {name: weight.shape for name, weight in torch.load(root / "two", weights_only=True).items()} == shapes
    content = torch.load(root / "optimizer_two", weights_only=True)
    stepped = {i: state for i, state in content["state"].items() if "step" in state}  # others have a master only
    moments = {content["param_names"][i]: state["exp_avg"].shape for i, state in stepped.items()}
    assert moments.keys() == {name for name, p in plain.named_parameters() if p.requires_grad and "unused" not in name}
    assert all(shape == shapes[name] for name, shape in moments.items())


@pytest.mark.heavy
def test_sizes_that_fill_no_rank_go_from_four_ranks_to_fewer(pool4: RankPool, tmp_path: Path) -> None:
    """FF-16: whole models' shards, and shards of the optimizer's state alone."""
    alone = {"shard_optimizer_state": True}
    kinds = {"shards": config(4, 2), "state": {**config(1, 2), **alone}}
    cases = [(kind, partial, str(tmp_path / f"{kind}-{partial}")) for kind in kinds for partial in (True, False)]
    whole = {path: pool4.run(uninterrupted, path, partial, config=kinds[kind])[0] for kind, partial, path in cases}
    for num, afters in ((4, kinds.values()), (3, [config(3, 2), {**config(1, 2), **alone}]), (2, [{**config(1, 2), **alone}]), (1, [config(1, 2)])):
        with RankPool(num) as pool:
            for _, partial, path in cases:
                for after in afters:
                    for run in pool.run(resumed, path, partial, config=after):
                        assert run.keys() == whole[path].keys()
                        for name, weight in whole[path].items():
                            assert run[name].shape == weight.shape
                            torch.testing.assert_close(run[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_a_checkpoint_without_sharding_is_taken_over(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path)
    plain = {**config(1, 2), "shard_optimizer_state": True}
    whole = pool2.run(uninterrupted, path, True, config=plain)[0]
    for run in pool4.run(resumed, path, True, config=config(2, 2)):
        for name, weight in whole.items():
            torch.testing.assert_close(run[name], weight, rtol=1e-5, atol=1e-6)


def sliced(path: str, resume: bool) -> dict[str, Tensor]:
    """A GPT-2 in tp slices; four steps, saved or resumed after two."""
    plain, make_batch, loss_of = models.make("gpt2", seed=5 if resume else 0)
    smp.set_tensor_parallelism(plain, True)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def gpt_step(model: Any, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    for step in range(4):
        if step == 2 and not resume:
            smp.save_checkpoint(path, "two", model=model, optimizer=optimizer)
        elif step == 2:
            smp.resume_from_checkpoint(path, "two")
        elif resume and step < 2:
            continue
        optimizer.zero_grad()
        gpt_step(model, make_batch(step, 8))
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


@pytest.mark.heavy
def test_shards_of_slices(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    tensor_parallel = {"tensor_parallel_degree": 2, "prescaled_batch": True}
    whole = pool4.run(sliced, str(tmp_path), False, config=config(2, 2, **tensor_parallel), timeout_s=120)[0]
    names = {p.name for p in (tmp_path / "two_partial").glob("optimizer_*")}
    assert names == {f"optimizer_{tp}_{shard}.pt" for tp in range(2) for shard in range(2)}
    assert {p.name for p in (tmp_path / "two_partial").glob("model_*")} == {"model_0.pt", "model_0_1.pt", "model_1.pt", "model_1_1.pt"}
    for run in pool4.run(sliced, str(tmp_path), True, config=config(2, 2, **tensor_parallel), timeout_s=120):
        assert all(torch.equal(run[name], weight) for name, weight in whole.items())
    for run in pool2.run(sliced, str(tmp_path), True, config=config(1, 2, **tensor_parallel), timeout_s=120):
        for name, weight in whole.items():
            torch.testing.assert_close(run[name], weight, rtol=1e-5, atol=1e-6)
