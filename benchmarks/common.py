"""Shared frame of the benchmarks: rows in fresh processes, several rounds, medians of quiet steps.

A script defines `ROWS: dict[str, Row]` and calls `main`. Every row of every round gets processes of its own,
with torchrun's variables and the row's number of threads set, so that peak memory belongs to the row and the
rows of one round see the same noise. A row's function returns the figures of its rank, see
`measure.timed_steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

RankResult = dict[str, Any]
Rounds = list[list[RankResult]]  # [round][rank]
QUIET_CORES = 0.12


@dataclass(frozen=True)
class Row:
    """One line of a table.

    num_ranks: processes.   threads: of each process.   run: called in each with the parsed arguments.
    """

    num_ranks: int
    threads: int
    run: Callable[[argparse.Namespace], RankResult]


@dataclass(frozen=True)
class StepTime:
    """Step time of one row over all rounds, in seconds, and how good the figure is.

    num_quiet of num_steps had less than 0.12 cores of foreign load; the median is over these, or over the
    quietest third if there are none. spread: (largest - smallest) / median of the steps used.
    cpu_s: processor time of one rank in a step, the mean over ranks; it suffers less from a busy machine.
    """

    seconds: float
    cpu_s: float
    num_quiet: int
    num_steps: int
    foreign_cores: float
    spread: float


def step_time(rounds: Rounds) -> StepTime | None:
    """Sum up all timed steps of a row. None for a row without steps."""
    steps: list[tuple[float, float, float]] = []
    for ranks in rounds:
        for index, first in enumerate(ranks[0].get("steps", [])):
            own_s = sum(rank["steps"][index]["cpu_s"] for rank in ranks)
            foreign = max(0.0, first["machine_s"] - own_s) / first["s"]
            steps.append((foreign, first["s"], own_s / len(ranks)))
    if not steps:
        return None
    steps.sort()
    quiet = [step for step in steps if step[0] <= QUIET_CORES]
    used = quiet or steps[: max(1, len(steps) // 3)]
    seconds = [step[1] for step in used]
    middle = statistics.median(seconds)
    return StepTime(
        seconds=middle,
        cpu_s=statistics.median(step[2] for step in used),
        num_quiet=len(quiet),
        num_steps=len(steps),
        foreign_cores=statistics.median(step[0] for step in steps),
        spread=(max(seconds) - min(seconds)) / middle,
    )


def median_of(rounds: Rounds, key: str, rank: int | None = None) -> float | None:
    """Median over rounds of a figure, of one rank or the largest of all. None where it is absent."""
    values = []
    for ranks in rounds:
        found = [r[key] for r in (ranks if rank is None else [ranks[rank]]) if key in r]
        if found:
            values.append(max(found))
    return statistics.median(values) if values else None


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; numbers with three digits, "-" for None."""

    def text(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(text, line)) + " |" for line in lines)


def start() -> int:
    """In a process of a row: set the threads, and join the default process group where there is one. Returns the rank."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    return int(os.environ["RANK"])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _launch(name: str, row: Row, timeout_s: float) -> list[RankResult] | str:
    """Run one row once. Returns the ranks' figures, or why it failed."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        processes = []
        for rank in range(row.num_ranks):
            environment = {
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(row.num_ranks), "LOCAL_WORLD_SIZE": str(row.num_ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(row.threads), "MKL_NUM_THREADS": str(row.threads),
                "BENCHMARK_OUT": f"{folder}/{rank}.json",
            }  # fmt: skip
            command = [sys.executable, sys.argv[0], "--worker", name, *sys.argv[1:]]
            with Path(folder, f"{rank}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait(processes, timeout_s)
        results: list[RankResult] = []
        for rank, process in enumerate(processes):
            file = Path(folder, f"{rank}.json")
            if not file.exists():
                lines = [line for line in Path(folder, f"{rank}.log").read_text().splitlines() if line.strip()]
                errors = [line for line in lines if "Error" in line] or lines or ["no output"]
                return f"rank {rank} ended with {process.returncode}: {errors[-1][-300:]}"
            results.append(json.loads(file.read_text()))
    return results


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for all; kill what is left when time is up or one has failed."""
    end = time.monotonic() + timeout_s
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() not in (None, 0) for p in processes):
            time.sleep(1)
            break
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def main(
    rows: Mapping[str, Row],
    report: Callable[[dict[str, Rounds], argparse.Namespace], str],
    parser: argparse.ArgumentParser,
) -> None:
    """Parse the command line, run the rows in turn round by round, print the report.

    report: from the results of the rows that ran, and the arguments, to the text to print.
    """
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="", help="names separated by '|'; all if left out")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is run")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a row in one round")
    parser.add_argument("--wait", type=float, default=15, help="most seconds to wait for a quiet machine")
    parser.add_argument("--json", help="write all raw figures to this file")
    args = parser.parse_args()
    if args.worker:
        _work(rows[args.worker], args)
    names = args.rows.split("|") if args.rows else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        parser.error(f"unknown rows {unknown}; there are: {' | '.join(rows)}")
    results: dict[str, Rounds] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for index in range(args.rounds):
        for name in (name for name in names if name not in failures):
            measure.wait_until_quiet(most_s=args.wait)
            start = time.monotonic()
            got = _launch(name, rows[name], args.timeout)
            if isinstance(got, str):
                failures[name] = got
            else:
                results[name].append(got)
            print(f"# round {index}, {name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    if args.json:
        raw = {"about": measure.provenance(), "results": results, "failures": failures}
        Path(args.json).write_text(json.dumps(raw, indent=1))
    print(report({name: rounds for name, rounds in results.items() if rounds}, args))
    print("\n" + "\n".join(measure.provenance()))
    for name, why in failures.items():
        print(f"\nfailed: {name}: {why}")
    sys.exit(1 if failures else 0)


def _work(row: Row, args: argparse.Namespace) -> None:
    """Run a row's function in this process, which is one of its ranks, and end the process."""
    result = row.run(args)
    out = Path(os.environ["BENCHMARK_OUT"])
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(out)
    sys.stdout.flush()
    os._exit(0)  # tearing groups down is not what is measured
