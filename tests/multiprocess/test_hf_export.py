"""FF-34: folders for `from_pretrained`, from a running job of any layout and from its checkpoints, tied weights and untied."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_models
import shardwright.torch as smp
from any_layout import config
from harness import RankPool
from hf_distributed import batch_of
from shardwright.cli.main import main
from shardwright.errors import UsageError

SMALL = "20KB"


def wrap(case: str, **changes: Any) -> Any:
    """A wrapped, partitioned model whose weights are still those of the plain one."""
    made = hf_models.make(case, **changes)
    smp.set_tensor_parallelism(made)
    model = smp.DistributedModel(made)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))

    @smp.step
    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        model.backward(loss)
        return loss

    step(model, batch_of(case, size=2))
    optimizer.step()
    return model, optimizer


def export(path: str, case: str, **changes: Any) -> None:
    """Live, in one file and in several, and checkpoints of all kinds."""
    model, optimizer = wrap(case, **changes)
    smp.export_huggingface(f"{path}/one")
    smp.export_huggingface(f"{path}/several", model, SMALL)
    smp.save_checkpoint(f"{path}/saved", "partial", model=model, optimizer=optimizer)
    smp.save_checkpoint(f"{path}/saved", "full", partial=False, model=model, translate_if_full=False)
    smp.save_checkpoint(f"{path}/saved", "translated", partial=False, model=model)


@contextmanager
def quiet() -> Iterator[None]:
    """Fail on any warning, of Python or of transformers."""
    told: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Collector(logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
    assert [*told, *(str(w.message) for w in caught)] == []


def check(folder: Path, case: str, *, files: int | None = None, **changes: Any) -> None:
    """What is loaded is the plain model; the index and the files list each weight once."""
    plain: Any = hf_models.make(case, **changes)
    with quiet():
        loaded, report = type(plain).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    want, got = plain.state_dict(), loaded.state_dict()
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied
    batch = batch_of(case, size=2)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, plain.eval()(**batch).logits)
    stored = stored_names(folder)
    assert len(stored) == len(set(stored)) == len({id(tensor) for tensor in plain.state_dict(keep_vars=True).values()})
    weights = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    assert files is None or len(weights) == files
    rest = {"config.json", "generation_config.json"} | ({"model.safetensors.index.json"} if len(weights) > 1 else set())
    assert set(os.listdir(folder)) == {*weights, *rest}
    if len(weights) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(stored)
        assert set(index["weight_map"].values()) == set(weights)


def stored_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_from_pretrained_loads_what_stages_and_slices_wrote(
    request: pytest.FixtureRequest, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """FF-34 as it is written: GPT-2 of four blocks, 2 x 2."""
    changes = {"n_layer": 4, "tie_word_embeddings": tied}
    pool: RankPool = request.getfixturevalue("pool4")
    pool.run(export_gpt2, str(tmp_path), tied, config=config((2, 2, 1)), timeout_s=150)
    check(tmp_path / "one", "gpt2", files=1, **changes)
    check(tmp_path / "several", "gpt2", **changes)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    for tag in ("partial", "full", "translated"):
        run = ["ckpt", "export", tmp_path / "saved", tmp_path / f"from_{tag}", "--tag", tag, "--format", "hf"]
        with pytest.raises(SystemExit) as end:
            main([*map(str, run), "--max-shard-size", SMALL])
        assert not end.value.code, capsys.readouterr()
        check(tmp_path / f"from_{tag}", "gpt2", **changes)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def export_gpt2(path: str, tied: bool) -> None:
    export(path, "gpt2", n_layer=4, tie_word_embeddings=tied)


def export_others(path: str) -> list[str]:
    """Other families in one go, and what is refused on every rank."""
    for case in FAMILIES:
        model, _ = wrap(case)
        smp.export_huggingface(f"{path}/{case}", model, SMALL)
        smp.shutdown()
        smp.init(config((1, 2, 1)))
    model, _ = wrap("llama_tied")
    reasons = []
    for folder, size in ((f"{path}/{FAMILIES[0]}", "5GB"), (f"{path}/new", "many")):
        with pytest.raises(UsageError) as caught:
            smp.export_huggingface(folder, model, size)
        reasons.append(str(caught.value))
    smp.shutdown()
    smp.init(config((1, 1, 2)))
    plain = smp.DistributedModel(nn.Linear(2, 2))
    with pytest.raises(UsageError) as caught:
        smp.export_huggingface(f"{path}/new", plain)
    return [*reasons, str(caught.value)]


FAMILIES = ("llama_tied", "mixtral", "gptneox", "bert")


def test_other_families_and_what_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    """Tied Llama, Mixtral (whose experts are stored one by one), fused projections, a head with a tied bias."""
    for reasons in pool2.run(export_others, str(tmp_path), config=config((1, 2, 1)), timeout_s=150):
        assert ["isn't empty" in reasons[0], "many" in reasons[1], "no model of transformers" in reasons[2]] == [True] * 3
    for case in FAMILIES:
        plain: Any = hf_models.make(case)
        with quiet():
            loaded, report = type(plain).from_pretrained(tmp_path / case, output_loading_info=True)
        assert not any(report.values()), report
        want, got = plain.state_dict(), loaded.state_dict()
        assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert any("experts.1.w2" in name or "experts.1.down_proj" in name for name in stored_names(tmp_path / "mixtral"))
    assert sorted(os.listdir(tmp_path)) == sorted(FAMILIES), "nothing is left of what was refused"
