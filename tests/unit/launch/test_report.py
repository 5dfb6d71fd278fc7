"""Who failed first, and what is said about it."""

from __future__ import annotations

import pytest

from shardwright.launch.report import (
    WorkerEnd,
    describe_failure,
    exception_line,
    exit_status,
    first_failure,
    follows_from_stop,
    traceback_start,
)

PLAIN = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
    ^^^^^^
ValueError: bad shape
  at world rank 1
  try: pad it
"""
CHAINED = f"""{PLAIN}
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise RuntimeError("step failed")
RuntimeError: step failed
"""
ECHO = f"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
shardwright.errors.RemoteRankError: rank 1 failed
  its traceback:
{PLAIN}"""


def _prefixed(text: str) -> str:
    return "".join(f"[rank1]: {line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("traceback", "line"),
    [
        (PLAIN, "ValueError: bad shape"),
        (_prefixed(PLAIN), "ValueError: bad shape"),
        (CHAINED, "RuntimeError: step failed"),
        (ECHO, "shardwright.errors.RemoteRankError: rank 1 failed"),
        (
            '  File "train.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax",
        ),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("", ""),
    ],
)
def test_exception_line(traceback: str, line: str) -> None:
    assert exception_line(traceback) == line


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("Traceback (most recent call last):\n", 0),
        ("[rank3]: Traceback (most recent call last):\n", 0),
        ("  + Exception Group Traceback (most recent call last):\n", 0),
        (" 50%|##  | 5/10Traceback (most recent call last):\n", 15),
        ('  File "train.py", line 1\n', 0),
        ("  | Traceback (most recent call last):\n", None),
        ("step 3 loss 2.1\n", None),
        ("see Traceback (most recent call last): above\n", None),
    ],
)
def test_traceback_start(line: str, start: int | None) -> None:
    assert traceback_start(line) == start


def test_the_earliest_failure_counts() -> None:
    ends = [
        WorkerEnd(0, 1, 5.0),
        WorkerEnd(1, 1, 4.0),
        WorkerEnd(2, 0, 1.0),
        WorkerEnd(3, -15, 3.0, stopped=True),
    ]
    first = first_failure(ends)
    assert first is not None
    assert first.rank == 1


def test_an_echo_is_not_the_first_failure() -> None:
    first = first_failure([WorkerEnd(0, 1, 4.0, traceback=ECHO), WorkerEnd(1, -9, 5.0)])
    assert first is not None
    assert first.rank == 1


def test_an_echo_from_another_host_is_all_there_is() -> None:
    first = first_failure([WorkerEnd(0, 1, 4.0, traceback=ECHO), WorkerEnd(1, 1, 3.0, traceback=ECHO)])
    assert first is not None
    assert first.rank == 1


def test_a_report() -> None:
    ends = [
        WorkerEnd(0, 1, 5.0, traceback=ECHO),
        WorkerEnd(1, 1, 4.0, traceback=_prefixed(PLAIN)),
        WorkerEnd(2, 0, 1.0),
        WorkerEnd(3, -15, 9.0, stopped=True),
        WorkerEnd(4, -11, 4.5),
    ]
    assert describe_failure(ends) == (
        f"rank 1 failed first: exit code 1\n\n{PLAIN}\nother ranks:\n"
        "  rank 0: exit code 1; shardwright.errors.RemoteRankError: rank 1 failed\n"
        "  rank 2: finished\n"
        "  rank 3: stopped by the launcher\n"
        "  rank 4: killed by SIGSEGV\n"
    )


def test_a_traceback_that_was_shown_is_not_repeated() -> None:
    text = describe_failure([WorkerEnd(0, 1, 4.0, traceback=PLAIN, shown=True)])
    assert text == ("rank 0 failed first: exit code 1\n  ValueError: bad shape\n  (its traceback is above)\n")


def test_nothing_to_report() -> None:
    assert describe_failure([WorkerEnd(0, 0, 1.0), WorkerEnd(1, -9, 1.0, stopped=True)]) == ""


def test_exit_status() -> None:
    assert [exit_status(code) for code in (0, 3, -9)] == [0, 3, 137]


def test_what_follows_from_stopping_is_not_worth_showing() -> None:
    assert follows_from_stop(ECHO)
    assert follows_from_stop("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n")
    assert not follows_from_stop(PLAIN)


@pytest.mark.parametrize(
    ("exception", "remedy"),
    [
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "--emulate-cuda"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--emulate-cuda"),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", "model.backward(loss)"),
    ],
)
def test_errors_of_torch_that_beginners_meet_get_a_remedy(exception: str, remedy: str) -> None:
    end = WorkerEnd(0, 1, 1.0, traceback=f"Traceback (most recent call last):\n  File x\n{exception}\n", shown=True)
    last = describe_failure([end]).splitlines()[-1]
    assert last.startswith("  try: ")
    assert remedy in last
