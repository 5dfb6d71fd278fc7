"""`make demo`: a transformers model cut over two pipeline stages is trained, saved, stopped and resumed.

1. A run without interruption, to compare with.
2. The same run, which saves a checkpoint at half time and is then stopped by a signal.
3. New processes that go on from the checkpoint, and write some text at the end.

Every loss of 2 and 3 must be the loss of 1, bit for bit; if one isn't, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPT = Path(os.path.relpath(Path(__file__).with_name("train_gpt2.py")))
OUTPUT = Path("demo-output")
CHECKPOINTS = OUTPUT / "checkpoints"
STAGES = 2
console = Console(highlight=False)


def start(name: str, *script_args: str, quiet: bool = False) -> subprocess.Popen[bytes]:
    """Start one training job and return its launcher. `quiet` leaves out the tables shown before."""
    options = ["--nproc", str(STAGES), "--pp", str(STAGES), *(["-o", "log_level=warning"] if quiet else [])]
    words = ["run", *options, str(SCRIPT), "--losses", str(losses_file(name)), *script_args]
    environment = dict(os.environ)
    if console.is_terminal:  # workers write into a pipe and would not draw a progress bar
        environment.update(FORCE_COLOR="1", COLUMNS=str(console.width))
    console.print("[dim]$ shardwright " + " ".join(words), soft_wrap=True)
    return subprocess.Popen([sys.executable, "-m", "shardwright.cli.main", *words], env=environment)


def finish(job: subprocess.Popen[bytes]) -> None:
    """Wait for a job that must succeed."""
    if job.wait() != 0:
        fail(f"training ended with exit code {job.returncode}")


def stop_after_save(job: subprocess.Popen[bytes]) -> None:
    """Stop a job once its checkpoint is complete, which the file `newest` says."""
    while not (CHECKPOINTS / "newest").exists():
        if job.poll() is not None:
            fail(f"training ended with exit code {job.returncode} before it had saved")
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    job.wait()
    console.show_cursor()  # a progress bar that is stopped leaves it hidden
    left = workers_left()
    if left:
        fail(f"processes are left after the stop: {left}")
    console.print("stopped; no process is left")


def workers_left() -> list[int]:
    """Process ids of training workers of this demo (only where there is /proc)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # gone in the meantime
            continue
        if str(SCRIPT).encode() in words and str(CHECKPOINTS).encode() in words:
            found.append(int(folder.name))
    return found


def losses_file(name: str) -> Path:
    return OUTPUT / f"losses_{name}.jsonl"


def losses(name: str) -> dict[int, float]:
    """Loss by step, as the job wrote it; a line cut by a signal is left out."""
    lines = losses_file(name).read_text().split("\n")[:-1]
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def compare(num_steps: int, half: int) -> None:
    """Show both loss curves side by side, and fail unless they are equal."""
    whole, before, after = losses("whole"), losses("stopped"), losses("resumed")
    joined = {**{step: before[step] for step in range(half)}, **after}
    table = Table("step", "uninterrupted", "stopped and resumed", title="loss")
    marks = sorted({0, half // 2, half - 1, half, half + 1, (half + num_steps) // 2, num_steps - 1})
    for step in marks:
        note = "  <- first after the resume" if step == half else ""
        table.add_row(str(step + 1), f"{whole[step]:.9f}", f"{joined[step]:.9f}{note}")
    console.print(table)
    different = [step + 1 for step in range(num_steps) if whole[step] != joined.get(step)]
    if different:
        fail(f"{len(different)} of {num_steps} losses differ, the first at step {different[0]}")
    console.print(f"all {num_steps} losses are equal, bit for bit")


def fail(why: str) -> None:
    console.print(f"[bold red]demo failed:[/] {why}")
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole run (default 200)")
    steps = parser.parse_args().steps
    half = steps // 2
    began = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    saving = ["--save-at", str(half), "--checkpoint", str(CHECKPOINTS)]

    console.rule("1  without interruption")
    finish(start("whole", "--steps", str(steps)))
    console.rule("2  saved at half time and stopped")
    stop_after_save(start("stopped", "--steps", str(steps), *saving, quiet=True))
    console.rule("3  resumed in new processes")
    finish(start("resumed", "--steps", str(steps), "--resume", str(CHECKPOINTS), "--sample", "120", quiet=True))
    console.rule("compared")
    compare(steps, half)
    console.print(f"{time.perf_counter() - began:.0f} s in all; losses and checkpoint are in {OUTPUT}/")


if __name__ == "__main__":
    main()
