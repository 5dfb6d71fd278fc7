"""Checkpoints in an object store: a real S3 server in a process of its own, which fails when it is told to."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpoint_ranks as ranks
import shardwright.torch as smp
from any_layout import config, train, wrap
from harness import RankPool
from s3_server import CUT, S3Server, fail_at
from shardwright.checkpoint import storage
from shardwright.cli.main import main
from shardwright.errors import CheckpointError

TWO_STAGES = {"pipeline_parallel_degree": 2}


@pytest.fixture
def prefix(server: S3Server) -> Iterator[str]:
    """Below this name nothing is there."""
    server.behave()
    yield f"run-{uuid.uuid4().hex[:8]}"
    server.behave()


@pytest.fixture
def url(server: S3Server, prefix: str) -> str:
    return f"s3://{server.bucket}/{prefix}"


def run(pool: RankPool, server: S3Server, function: Any, *args: Any, config: dict[str, Any], **options: Any) -> list[Any]:
    """Call a function of `checkpoint_ranks` on every rank, with keyword arguments."""
    environment = {**server.environment, "SHARDWRIGHT_STORAGE_ATTEMPTS": "2"}
    return pool.run(
        ranks.with_options, function.__name__, args, options, config=config, environment=environment, timeout_s=240
    )


def names(server: S3Server, prefix: str) -> list[str]:
    """Objects, without the ids of saves."""
    found = []
    for key in server.keys(prefix + "/"):
        parts = key.split("/")[1:]
        found.append("/".join("ID" if len(part) == 32 else part for part in parts))
    return found


def check_equal(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for one, other in zip(straight, resumed, strict=True):
        assert other.pop("content") == {"epoch": 3, "rank": 0}
        other.pop("restored")
        assert other == one


def test_a_resumed_run_equals_an_uninterrupted_one(pool2: RankPool, server: S3Server, prefix: str, url: str) -> None:
    straight = run(pool2, server, ranks.train_and_save, url, config=TWO_STAGES)
    assert names(server, prefix) == [
        "newest",
        *(f"step_2_partial/ID/model_{stage}_0.pt" for stage in (0, 1)),
        *(f"step_2_partial/ID/optimizer_{stage}_0.pt" for stage in (0, 1)),
        "step_2_partial/ID/partition_info.pt",
        "step_2_partial/ID/rng_0.pt",
        "step_2_partial/ID/rng_1.pt",
        "step_2_partial/ID/user_content.pt",
        "step_2_partial/manifest.json",
    ]
    check_equal(straight, run(pool2, server, ranks.resume_and_train, url, config=TWO_STAGES))
    # The same tag again, in the background; the files of the first save go, and nothing else stays behind, neither of a
    # save that was interrupted.
    before = names(server, prefix)
    server.put(f"{prefix}/step_2_partial/{'f' * 32}/model_0_0.pt", b"half")
    check_equal(straight, run(pool2, server, ranks.resume_and_train, url, config=TWO_STAGES))
    straight = run(pool2, server, ranks.train_and_save, url, blocking=False, config=TWO_STAGES)
    assert names(server, prefix) == before
    check_equal(straight, run(pool2, server, ranks.resume_and_train, url, config=TWO_STAGES))


# ------------------------------------------------------------------ failures


def same_on_all(told: list[Any]) -> str:
    assert len(set(told)) == 1, told
    assert told[0] != ("", ""), "nothing was raised"
    return str(told[0][1])


def test_a_part_that_fails_in_passing_is_sent_again(pool2: RankPool, server: S3Server, prefix: str, url: str) -> None:
    server.fail(method="PUT", key="optimizer", times=1)
    server.fail(method="PUT", key="manifest.json", times=1, status=500)
    server.fail(method="PUT", key="newest", times=1, status=0)
    straight = run(pool2, server, ranks.train_and_save, url, config=TWO_STAGES)
    assert sum(request["status"] in (0, 500, 503) for request in server.requests()) == 3
    check_equal(straight, run(pool2, server, ranks.resume_and_train, url, config=TWO_STAGES))


@pytest.mark.parametrize("key", ["optimizer_1_0", "manifest.json"])
def test_a_save_that_fails_leaves_the_one_before(
    pool2: RankPool, server: S3Server, prefix: str, url: str, key: str
) -> None:
    """The same tag again; the store refuses an object for good."""
    straight = run(pool2, server, ranks.train_and_save, url, config=TWO_STAGES)
    before = server.keys(prefix + "/")
    server.fail(method="PUT", key=key)
    text = same_on_all(run(pool2, server, ranks.save_error, url, "step_2", config=TWO_STAGES))
    assert key in text
    assert url in text
    assert "could not write it after 2 attempts" in text
    assert "check the endpoint, the network and the bucket" in text
    server.behave()
    assert server.keys(prefix + "/") == before
    assert server.unfinished_uploads() == []
    check_equal(straight, run(pool2, server, ranks.resume_and_train, url, config=TWO_STAGES))


def test_a_store_that_does_not_answer_is_an_error_and_no_empty_folder(
    pool2: RankPool, server: S3Server, prefix: str, url: str
) -> None:
    run(pool2, server, ranks.train_and_save, url, config=TWO_STAGES)
    server.fail(status=0)
    text = same_on_all(run(pool2, server, ranks.resume_error, url, config=TWO_STAGES))
    assert "no partial checkpoint" not in text
    assert "could not read it after 2 attempts" in text
    assert url in text
    server.behave()
    server.fail(status=403)
    text = same_on_all(run(pool2, server, ranks.save_error, url, config=TWO_STAGES))
    assert "check the credentials" in text


@pytest.mark.heavy
def test_a_rank_that_dies_leaves_the_checkpoint_before(server: S3Server, prefix: str, url: str) -> None:
    environment = {**server.environment, "SHARDWRIGHT_STORAGE_ATTEMPTS": "2"}
    with RankPool(2) as pool:
        straight = run(pool, server, ranks.train_and_save, url, config=TWO_STAGES)
        outcomes = pool.outcomes(
            ranks.die_while_saving, url, "step_2", 0, "writing", config=TWO_STAGES, environment=environment, timeout_s=240
        )
        assert all(outcome.error is not None for outcome in outcomes)
        assert len({key.split("/")[2] for key in server.keys(f"{prefix}/step_2_partial/") if key.count("/") == 3}) == 2
        check_equal(straight, run(pool, server, ranks.resume_and_train, url, config=TWO_STAGES))
        # The next save takes away what the dead one left.
        run(pool, server, ranks.train_and_save, url, "step_4", config=TWO_STAGES)
    assert len({key.split("/")[2] for key in server.keys(f"{prefix}/step_2_partial/") if key.count("/") == 3}) == 1


def test_retention(pool2: RankPool, server: S3Server, prefix: str, url: str) -> None:
    for tag in ("a", "b", "c"):
        run(pool2, server, ranks.train_and_save, url, tag, num_kept_partial_checkpoints=2, config=TWO_STAGES)
    assert {name.split("/")[0] for name in names(server, prefix)} == {"b_partial", "c_partial", "newest"}
    assert server.get(f"{prefix}/newest") == b"c_partial"


# ------------------------------------------------------------------ real models, full checkpoints, single files


def save_both(url: str) -> list[float]:
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 2)
    content = {"step": 2}
    smp.save_checkpoint(url + "/partial", "mid", model=model, optimizer=optimizer, user_content=content)
    for _ in range(2):  # the same tag again
        smp.save_checkpoint(url + "/full", "mid", partial=False, model=model, optimizer=optimizer, user_content=content)
    parts = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save({"place": smp.pp_rank(), **parts, **content}, url + "/files/mine")
    smp.barrier()
    assert smp.load(url + "/files/mine")["place"] == smp.pp_rank()
    return train(made, model, optimizer, 2, 4)


def go_on(url: str, partial: bool) -> list[float]:
    made, model, optimizer = wrap("mlp", seed=1)
    if url.endswith("/files"):
        content = smp.load(url + "/mine")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    else:
        content = smp.resume_from_checkpoint(url, partial=partial)
    return train(made, model, optimizer, content["step"], 4)


def resume_damaged(url: str) -> str:
    wrap("mlp")
    with pytest.raises(CheckpointError) as error:
        smp.resume_from_checkpoint(url, "mid")
    return str(error.value)


def wide(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)]))
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


@smp.step
def wide_step(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def wide_losses(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(step))
        losses.append(float(wide_step(model, x).reduce_mean().detach()))
        optimizer.step()
    return losses


def save_wide(url: str) -> list[float]:
    model, optimizer = wide(0)
    wide_losses(model, optimizer, 0, 2)
    smp.save_checkpoint(url, "mid", partial=False, model=model, optimizer=optimizer)
    return wide_losses(model, optimizer, 2, 4)


def resume_wide(url: str) -> list[float]:
    model, optimizer = wide(1)
    smp.resume_from_checkpoint(url, "mid", partial=False)
    return wide_losses(model, optimizer, 2, 4)


def resume_wide_and_lose(url: str) -> list[tuple[str, str]]:
    """The store answers when the model resumes, but no longer when its tensors are wanted."""
    model, optimizer = wide(1)
    smp.resume_from_checkpoint(url, "mid", partial=False)
    if smp.rank() == 0:
        fail_at(os.environ["AWS_ENDPOINT_URL"], method="GET", key="/mid")
    smp.barrier()
    return [ranks.caught(wide_losses, model, optimizer, 2, 3) for _ in range(2)]


def test_of_full_checkpoints_ranks_read_what_they_hold(pool2: RankPool, server: S3Server, prefix: str, url: str) -> None:
    environment = {**server.environment, "SHARDWRIGHT_SKIP_CHECKSUMS": "1"}
    straight = pool2.run(save_wide, url, config=config((2, 1, 1)), environment=environment, timeout_s=240)
    sizes = {name: len(server.get(f"{prefix}/{name}")) for name in ("mid", "optimizer_mid")}
    slack = 2 * (1 << 20)  # of two ranks, for what tells where tensors are
    for settings, times in ((config((2, 1, 1)), 1), (config((1, 1, 2), shard_optimizer_state=True), 2)):
        server.behave()
        server.fail(method="GET", key="mid", times=3, status=CUT)  # is tried again
        resumed = pool2.run(resume_wide, url, config=settings, environment=environment, timeout_s=240)
        assert resumed[0] == pytest.approx(straight[0], rel=1e-5)
        asked = [r for r in server.requests() if r["status"] != CUT]
        sent = {name: sum(r["sent"] for r in asked if r["key"] == f"{prefix}/{name}") for name in sizes}
        assert sizes["mid"] * times <= sent["mid"] <= sizes["mid"] * times + slack
        assert sizes["optimizer_mid"] <= sent["optimizer_mid"] <= sizes["optimizer_mid"] + slack
        assert len([r for r in server.requests() if r["status"] == CUT]) == 3
    environment["SHARDWRIGHT_STORAGE_ATTEMPTS"] = "2"
    first, second = zip(*pool2.run(resume_wide_and_lose, url, config=config((2, 1, 1)), environment=environment), strict=True)
    assert "could not read it after 2 attempts" in first[0][1]
    assert f"{url}/mid" in first[0][1]
    assert "check the endpoint" in first[1][1]
    assert all("load" in text for _, text in second), second


def save_wide_parts(url: str) -> None:
    model, optimizer = wide(0)
    wide_losses(model, optimizer, 0, 1)
    for tag in ("flipped", "deleted"):
        smp.save_checkpoint(url, tag, model=model, optimizer=optimizer)


def resume_wide_and_strike(url: str, tag: str) -> list[str]:
    """An object is damaged, or gone, when the first step reads what the model resumes with."""
    model, optimizer = wide(1)
    smp.resume_from_checkpoint(url, tag)
    smp.barrier()
    if smp.rank() == 0:
        folder = storage.place(url) / f"{tag}_partial"
        (path,) = (inside / "optimizer_1_0.pt" for inside in folder.iterdir() if inside.name != "manifest.json")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()
        if tag == "flipped":
            storage.of(path).put(path, bytes(content))
    smp.barrier()
    return [ranks.caught(wide_losses, model, optimizer, 1, 2)[1], ranks.caught(model.local_state_dict)[1]]


def test_what_is_read_in_the_first_step_is_checked(pool2: RankPool, server: S3Server, url: str) -> None:
    options = {"config": config((2, 1, 1)), "environment": server.environment, "timeout_s": 240}
    pool2.run(save_wide_parts, url, **options)
    for tag, problem in (("flipped", "optimizer_1_0.pt is flipped: bytes "), ("deleted", "/optimizer_1_0.pt")):
        for text, again in pool2.run(resume_wide_and_strike, url, tag, **options):
            assert problem in text
            assert "overwritten in part" in again


def save_full(url: str, name: str) -> list[float]:
    made, model, optimizer = wrap(name)
    train(made, model, optimizer, 0, 2)
    smp.save_checkpoint(url, "mid", partial=False, model=model, optimizer=optimizer, user_content={"step": 2})
    return train(made, model, optimizer, 2, 4)


def go_on_full(url: str, name: str) -> list[float]:
    made, model, optimizer = wrap(name, seed=1)
    content = smp.resume_from_checkpoint(url, partial=False)
    return train(made, model, optimizer, content["step"], 4)


@pytest.mark.heavy
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_full_checkpoints_of_transformers_in_slices(pool2: RankPool, server: S3Server, url: str, half: bool) -> None:
    """Names and values are translated both ways: fused and transposed projections."""
    more = {"bf16": True} if half else {}
    environment = {"environment": server.environment, "timeout_s": 240}
    straight = pool2.run(save_full, url, "gpt2", config=config((1, 2, 1), **more), **environment)
    resumed = pool2.run(go_on_full, url, "gpt2", config=config((1, 2, 1), **more), **environment)
    assert resumed[0] == pytest.approx(straight[0], rel=2e-2 if half else 1e-5)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["ckpt", *arguments])
    printed = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), printed.out + printed.err


def test_partial_and_full_from_stages_into_replicas_and_the_command_line(
    pool2: RankPool,
    server: S3Server,
    prefix: str,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    straight = pool2.run(save_both, url, config=config((2, 1, 1)), environment=server.environment, timeout_s=240)
    replicas = config((1, 1, 2), shard_optimizer_state=True)
    for folder, partial in (("partial", True), ("full", False), ("files", True)):
        resumed = pool2.run(
            go_on, f"{url}/{folder}", partial, config=replicas, environment=server.environment, timeout_s=240
        )
        assert resumed[0] == pytest.approx(straight[0], rel=1e-5)
    full = [name for name in names(server, prefix) if name.startswith("full/")]
    assert full == ["full/" + name for name in ("manifest_mid.json", "mid", "newest", "optimizer_mid", "rng_mid", "user_content_mid")]
    assert [name for name in names(server, prefix) if name.startswith("files/")] == ["files/mine_0", "files/mine_1"]

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    code, text = command(capsys, "ls", url + "/partial", "--json")
    assert (code, [row["name"] for row in json.loads(text)]) == (0, ["mid_partial"])
    assert command(capsys, "show", url + "/full", "mid")[0] == 0
    assert command(capsys, "diff", url + "/partial/mid", url + "/partial/mid_partial") == (0, "no difference\n")
    code, text = command(capsys, "diff", url + "/partial/mid", url + "/full/mid", "--json")
    assert (code, {row["detail"] for row in json.loads(text)}) == (1, {"only in mid_partial"})  # its optimizer
    code, text = command(capsys, "export", url + "/partial", str(tmp_path / "model.safetensors"))
    assert code == 0, text
    for form in ("torch", "safetensors", "dcp"):
        code, text = command(capsys, "export", url + "/partial", f"{url}/out/{form}.{form}", "--format", form, "--json")
        assert code == 0, text
        assert json.loads(text)["bytes"] == sum(len(server.get(key)) for key in server.keys(f"{prefix}/out/{form}."))
    assert f"{prefix}/out/dcp.dcp/.metadata" in server.keys(prefix)
    for form in ("torch", "safetensors", "dcp"):
        trust = ["--trust"] if form == "dcp" else []
        code, text = command(capsys, "import", f"{url}/out/{form}.{form}", url + "/imported", "--tag", form, *trust)
        assert code == 0, text
        assert command(capsys, "diff", f"{url}/imported/{form}", url + "/full/mid") == (0, "no difference\n")
    code, text = command(capsys, "export", url + "/partial", f"{url}/out/torch.torch")
    assert (code, "exists" in text) == (2, True), text
    code, text = command(capsys, "reshard", url + "/partial/mid", url + "/resharded", "--pp", "1", "--rdp", "2", "--tag", "new")
    assert code == 0, text
    assert command(capsys, "diff", url + "/partial/mid", url + "/resharded/new") == (0, "no difference\n")
    assert command(capsys, "verify", url + "/partial", "--all")[0] == 0
    key = next(key for key in server.keys(f"{prefix}/partial/") if key.endswith("optimizer_1_0.pt"))
    content = bytearray(server.get(key))
    content[len(content) // 2] ^= 1
    server.put(key, bytes(content))
    code, text = command(capsys, "verify", url + "/partial", "mid", "--json")
    assert code == 1
    assert [(p["kind"], p["file"]) for p in json.loads(text)["mid_partial"]] == [("flipped", "optimizer_1_0.pt")]
    assert command(capsys, "prune", url + "/partial", "--keep", "1") == (0, "nothing to delete\n")
    told = pool2.run(resume_damaged, url + "/partial", config=replicas, environment=server.environment, timeout_s=240)
    assert all("optimizer_1_0.pt is flipped: bytes" in text for text in told), told
