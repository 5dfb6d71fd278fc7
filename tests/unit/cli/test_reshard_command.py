"""`shardwright ckpt reshard`: what is written, the way back, and what is refused. Jobs resume in tests/multiprocess."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import reconstruction
import shardwright.torch as smp
import small_checkpoints
from shardwright.checkpoint.manifest import Manifest

Run = Callable[..., tuple[int, str]]

LAYOUTS = {
    "stages": ("--pp", 3, "--rdp", 2),
    "shared": ("--pp", 2, "--rdp", 2, "--shard-optimizer-state", "--bucket-cap-mb", 0.001),
    "replicas": ("--rdp", 3, "--shard-optimizer-state", "--placement-strategy", "spread"),
    "sharded": ("--rdp", 4, "--sharded-data-parallel-degree", 2),
}


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_bytes((folder / "manifest.json").read_bytes(), where="here")


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_and_back(saved: Path, tmp_path: Path, run: Run, precision: str, name: str) -> None:
    start, there, back = saved / precision, tmp_path / "there", tmp_path / "back"
    assert run("reshard", start / "two", there, *LAYOUTS[name])[0] == 0
    assert (there / "newest").read_text() == "two_partial"
    assert run("verify", there, "--all")[0] == 0
    assert run("diff", start / "two_partial", there / "two_partial") == (0, "no difference\n")
    other = ("--pp", 1, "--rdp", 1, "--whole-optimizer-state", "--sharded-data-parallel-degree", 1)
    assert run("reshard", there / "two", tmp_path / "between", "--pp", 2, *other[2:])[0] == 0
    assert run("reshard", tmp_path / "between" / "two", back, *other, "--placement-strategy", "cluster")[0] == 0
    files = sorted(path.name for path in (start / "two_partial").iterdir())
    assert sorted(path.name for path in (back / "two_partial").iterdir()) == files
    for file in files:
        if file.endswith(".pt"):
            contents = [torch.load(root / "two_partial" / file, weights_only=False) for root in (start, back)]
            assert equal(*contents), file
    one, two = (manifest_of(root / "two_partial") for root in (start, back))
    assert (two.layout, two.partition, two.converted_from) == (one.layout, None, None)
    assert (two.ties, two.param_groups, two.structure) == (one.ties, one.param_groups, one.structure)


def test_layout_of_files(saved: Path, tmp_path: Path, run: Run) -> None:
    """Every stage has something, tied tensors are on one stage and one tensor, and pieces are all of each parameter."""
    code, text = run("reshard", saved / "bf16" / "two", tmp_path, *LAYOUTS["shared"], "--tag", "new", "--json")
    assert code == 0
    folder = tmp_path / "new_partial"
    assert set(json.loads(text)["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    parts = [torch.load(folder / f"model_{pp}_0.pt") for pp in range(2)]
    assert all(len(part) > 1 for part in parts)
    assert sum(len(part) - 1 for part in parts) == len(torch.load(saved / "bf16" / "whole"))
    (holder,) = (part for part in parts if "head.weight" in part)
    assert holder["head.weight"].data_ptr() == holder["embedding.weight"].data_ptr()
    masters: dict[str, int] = {}
    for pp in range(2):
        for rdp in range(2):
            content = torch.load(folder / f"fp16_states_{pp}_0_{rdp}.pt")
            assert content["dynamic_loss_scale"] is False
            for index, values in content["state"].items():
                name = content["param_names"][index]
                masters[name] = masters.get(name, 0) + values["fp32_from_fp16"].numel()
    assert masters == {n: p.numel() for n, p in small_checkpoints.Small().named_parameters()}
    assert torch.load(folder / "partition_info.pt")["pp_size"] == 2
    assert len(list(folder.glob("rng_*"))) == 4


@pytest.mark.parametrize("name", ["shared", "sharded"])
def test_like_another_checkpoint(saved: Path, tmp_path: Path, run: Run, name: str) -> None:
    """All files are those that the same layout, told by options, has."""
    start = saved / "bf16" / "two"
    assert run("reshard", start, tmp_path, *LAYOUTS[name], "--tag", "told")[0] == 0
    assert run("reshard", start, tmp_path, "--like", tmp_path / "told", "--tag", "like")[0] == 0
    one, other = tmp_path / "told_partial", tmp_path / "like_partial"
    assert manifest_of(one).entries == manifest_of(other).entries
    assert manifest_of(one).layout == manifest_of(other).layout
    for file in one.glob("*.pt"):
        assert equal(*(torch.load(folder / file.name, weights_only=False) for folder in (one, other))), file.name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scripts_read_shards_by_themselves(saved: Path, tmp_path: Path, run: Run, precision: str) -> None:
    """Flat groups are those of the original, and what they hold is nowhere else."""
    start, folder = saved / precision, tmp_path / "two_partial"
    assert run("reshard", start / "two", tmp_path, *LAYOUTS["sharded"])[0] == 0
    whole = torch.load(start / "whole")
    found = reconstruction.full_state_dict(tmp_path)
    trained = {name for group in manifest_of(folder).param_groups for name in group}
    assert trained <= found.keys() <= whole.keys()
    for name, weight in found.items():
        assert torch.equal(weight.to(whole[name].dtype), whole[name]), name
    for file in folder.glob("fp16_states_*"):
        assert not torch.load(file)["state"]
    for file in folder.glob("model_*"):
        left = {name for name, value in torch.load(file)["module"].items() if value.numel()}
        assert left == {name for name, value in whole.items() if precision == "bf16" or name not in trained} - tied(folder, precision)


def tied(folder: Path, precision: str) -> set[str]:
    """Names of parameters that are in the flat groups under another name."""
    return set() if precision == "bf16" else {name for names in manifest_of(folder).ties for name in names}


def test_from_a_full_checkpoint(saved: Path, tmp_path: Path, run: Run) -> None:
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        assert run("reshard", saved / precision / "whole", out, "--rdp", 2)[0] == 0
        assert run("diff", saved / precision / "two", out / "whole_partial") == (0, "no difference\n")
        for file in ("rng_0.pt", "rng_1.pt"):  # a layout of one rank doesn't tell that replicas differ
            content = torch.load(out / "whole_partial" / file)
            assert equal(content, torch.load(saved / precision / "two_partial" / "rng_0.pt"))


@pytest.fixture
def job() -> Iterator[None]:
    smp.init({"microbatches": 2, "log_level": "warning"})
    yield
    smp.shutdown()


@pytest.mark.parametrize("tag", ["two", "whole"])
def test_training_goes_on(saved: Path, tmp_path: Path, run: Run, job: None, tag: str) -> None:
    """From a checkpoint that was converted for this layout, random state included."""
    other = ("--pp", 2, "--rdp", 3, "--shard-optimizer-state")
    back = ("--pp", 1, "--rdp", 1, "--whole-optimizer-state")
    assert run("reshard", saved / "fp32" / tag, tmp_path / "a", *other, "--tag", "other")[0] == 0
    assert run("reshard", tmp_path / "a" / "other", tmp_path / "b", *back)[0] == 0
    one, other_one = (torch.load(root / "rng_0.pt") for root in (saved / "fp32" / "two_partial", tmp_path / "b" / "other_partial"))
    assert equal(one, other_one)
    model, optimizer = small_checkpoints.wrapped(seed=1)
    assert smp.resume_from_checkpoint(tmp_path / "b")["step"] == 2
    losses = small_checkpoints.train(model, optimizer, 2, 4)
    assert losses == json.loads((saved / "fp32" / "losses.json").read_text())


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_model_of_replaced_modules(tmp_path: Path, run: Run, job: None, name: str) -> None:
    """Saved with one tp rank, cut for three: heads stay whole, also of a checkpoint in the names of the original model."""
    made = models.make(name)
    smp.set_tensor_parallelism(made.model)
    model = smp.DistributedModel(made.model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    smp.save_checkpoint(tmp_path, "part", model=model, optimizer=optimizer)
    for tag, translate in (("ours", False), ("original", True)):
        smp.save_checkpoint(tmp_path, tag, partial=False, model=model, optimizer=optimizer, translate_if_full=translate)
    layouts: list[tuple[object, ...]] = [("--pp", 2, "--tp", 3)]
    layouts += [("--pp", 2, "--rdp", 2, "--shard-optimizer-state"), ("--rdp", 2, "--sharded-data-parallel-degree", 2)]
    for number, options in enumerate(layouts):
        folders = []
        for tag in ("part", "ours", "original"):
            out = tmp_path / f"{number}_{tag}"
            code, text = run("reshard", tmp_path / tag, out, *options, "--tag", "new")
            assert code == 0, text
            folders.append(out / "new_partial")
        files = {path.name for path in folders[1].iterdir()}
        assert files == {path.name for path in folders[2].iterdir()}
        for file in (file for file in files if file.endswith(".pt")):
            contents = [torch.load(folder / file, weights_only=False) for folder in folders]
            assert equal(contents[1], contents[0]), file
            assert equal(contents[2], contents[0]), file
        one, other = (manifest_of(folder) for folder in (folders[0], folders[2]))
        assert (one.entries, one.origin, one.partition, set(one.ties)) == (other.entries, other.origin, other.partition, set(other.ties))
    if name == "gpt2":
        parts = [torch.load(tmp_path / "0_part" / "new_partial" / f"model_0_{tp}.pt") for tp in range(3)]
        queries = [next(len(value) for key, value in part.items() if key.endswith("query.weight")) for part in parts]
        size = sum(queries) // made.model.config.n_head
        assert queries == [size * count for count in (2, 1, 1)], "four heads"
    file = tmp_path / "manifest_original.json"
    manifest = Manifest.from_bytes(file.read_bytes(), where="here")
    file.write_bytes(dataclasses.replace(manifest, origin=None).to_bytes())  # of a model that isn't one of transformers
    for more in (("--tp", 3), ("--pp", 2)):
        code, text = run("reshard", tmp_path / "original", tmp_path / "no", *more)
        assert code == 2
        assert "names of the original model" in text


def test_refused(saved: Path, tmp_path: Path, run: Run) -> None:
    start = saved / "fp32" / "two"
    (tmp_path / "plan.json").write_text("{}")
    for arguments, words in (
        (("--tp", 2), "nothing of the model is cut over tp ranks"),
        (("--rdp", 3, "--sharded-data-parallel-degree", 2), "sharded_data_parallel_degree"),
        (("--pp", 2, "--placement-strategy", "XYZ"), "placement_strategy"),
        (("--partition", tmp_path / "none.json"), "can't read --partition"),
        (("--partition", tmp_path / "plan.json"), "not a partition"),
        (("--like", start, "--pp", 2), "--like says all"),
        (("--tag", "a/b"), "can't be the name of a checkpoint"),
        (("--tag", "whole", "--like", saved / "fp32" / "whole"), "has no layout"),
    ):
        code, text = run("reshard", start, tmp_path / "out", *arguments)
        assert code == 2
        assert words in text, text
    assert not (tmp_path / "out").exists()
    code, text = run("reshard", start, saved / "fp32", "--pp", 2)
    assert code == 2
    assert "exists" in text


def test_damage_is_not_copied(saved: Path, tmp_path: Path, run: Run) -> None:
    import shutil

    shutil.copytree(saved / "fp32", tmp_path / "copy")
    file = tmp_path / "copy" / "two_partial" / "optimizer_0_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, text = run("reshard", tmp_path / "copy" / "two", tmp_path / "out", "--pp", 2)
    assert code == 2
    assert "optimizer_0_0.pt is flipped" in text
