"""Files for clusters from the settings of a job, and the place that Slurm gives a launcher."""

from __future__ import annotations

import pytest
import yaml

from shardwright.errors import ConfigError
from shardwright.launch.command import LaunchSettings, settle
from shardwright.launch.emit import emit
from shardwright.launch.nodes import NodePlace, place_by_slurm, split_endpoint


def _settings(nnodes: int = 2, **options: object) -> LaunchSettings:
    config = {"pipeline_parallel_degree": 2, "ddp": True, "placement_strategy": "cluster"}
    return settle(
        "jobs/Pre_train.py",
        ["--text", "a $(b) 'c'"],
        nproc=8,
        nnodes=nnodes,
        master_addr="node 0",
        config=config,
        max_restarts=3,
        **options,  # type: ignore[arg-type]
    )


def _emit(form: str, settings: LaunchSettings, image: str | None = None) -> str:
    return emit(form, settings, image=image, inherited={"OMP_NUM_THREADS": "1"}, num_cores=8)


COMMAND = [
    *("shardwright", "run", "--nproc=8", "--nnodes=2", "--master-port=29500"),
    *("-o", "pipeline_parallel_degree=2", "-o", "ddp=true", "-o", 'placement_strategy="cluster"'),
    *("--grace-s=10", "--max-restarts=3", "jobs/Pre_train.py", "--text", "a $(b) 'c'"),
]


def test_slurm() -> None:
    text = _emit("slurm", _settings())
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=pre-train\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n")
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --signal=TERM@40\n" in text
    assert "gpus" not in _emit("slurm", _settings(emulate_cuda=True))


def test_kubernetes() -> None:
    service, job = yaml.safe_load_all(_emit("kubernetes", _settings(), "registry/train:1"))
    assert service["metadata"]["name"] == job["metadata"]["name"] == "pre-train"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == "pre-train"
    (container,) = pod["containers"]
    assert container["image"] == "registry/train:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    place = ["--node-rank=$(JOB_COMPLETION_INDEX)", "--master-addr=pre-train-0.pre-train"]
    assert container["command"] == [*COMMAND[:5], *place, *COMMAND[5:-1], "a $$(b) 'c'"]
    _, job = yaml.safe_load_all(_emit("kubernetes", _settings(1, emulate_cuda=True), "i"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    assert not [word for word in container["command"] if "place" in word and "=" not in word]
    with pytest.raises(ConfigError, match="needs a container image"):
        _emit("kubernetes", _settings())


def test_commands() -> None:
    lines = _emit("command", _settings()).splitlines()
    assert len(lines) == 2
    for node, line in enumerate(lines):
        assert f"torchrun --nproc-per-node=8 --nnodes=2 --node-rank={node} " in line
        assert " --max-restarts=3 " in line
    with pytest.raises(ConfigError, match="'pbs', expected one of: slurm, kubernetes, command"):
        _emit("pbs", _settings())


def test_the_place_that_slurm_gives() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    assert place_by_slurm({**step, "SLURM_STEP_NUM_TASKS": "2"}) == NodePlace(2, 1, "gpu07")
    assert place_by_slurm({**step, "SLURM_STEP_NUM_NODES": "1"}) is None
    assert place_by_slurm({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}) is None  # the batch script itself
    with pytest.raises(ConfigError, match="16 launchers on 2 nodes"):
        place_by_slurm({**step, "SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a", None)), ("a:29", ("a", 29)), ("[::1]:29", ("::1", 29)), ("[::1]", ("::1", None))],
)
def test_endpoints(text: str, expected: tuple[str, int | None]) -> None:
    assert split_endpoint(text) == expected


@pytest.mark.parametrize("text", ["a:b", ":29", ""])
def test_bad_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        split_endpoint(text)
