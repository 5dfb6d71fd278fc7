"""What a script for GPUs asks of torch, on a machine without one, with only the variable set.

Each check runs in a process of its own kind: the emulation is for good, and must not reach the other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shardwright.config import emulation

CHECKS = Path(__file__).with_name("checks_under_emulation.py")


def _run(program: list[str], **variables: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    result = subprocess.run(
        [sys.executable, *program], env=environment, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_cuda_calls() -> None:
    """The checks are pytest functions; their process has the variable alone, and imports the library first."""
    output = _run(["-m", "pytest", "-p", "no:cacheprovider", str(CHECKS)], **{emulation.VARIABLE: "1"})
    assert " passed" in output
    assert "skipped" not in output


def test_children_and_the_hidden_sitecustomize(tmp_path: Path) -> None:
    """With the launcher's variables it begins when torch is imported, whatever else is; another sitecustomize still runs."""
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    program = "import sys; print('torch' in sys.modules); import torch; print(torch.zeros(2, device='cuda:1').device)"
    variables = emulation.variables({"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])})
    assert _run(["-c", program], **variables).split("\n")[:3] == ["the other one", "False", "cpu"]


def test_variables_name_the_folder_once() -> None:
    first = emulation.variables({"PYTHONPATH": "/a"})
    assert emulation.variables(first) == first
    assert first["PYTHONPATH"].endswith(os.pathsep + "/a")
    assert (Path(first["PYTHONPATH"].split(os.pathsep)[0]) / "sitecustomize.py").is_file()
    assert not emulation.requested({emulation.VARIABLE: "0"})


def test_nothing_is_emulated_unasked() -> None:
    import shardwright.torch  # noqa: F401
    from shardwright.emulation import install

    assert not install.active
    assert not install.unneeded
    assert sys.modules["torch"]._C._len_torch_function_stack() == 0


def test_real_devices_are_left_alone() -> None:
    program = (
        "import torch; torch.cuda.is_available = lambda: True; before = torch.cuda.synchronize\n"
        "from shardwright.emulation import install\n"
        "install.install()\n"
        "assert install.unneeded and not install.active and torch.cuda.synchronize is before\n"
        "assert torch._C._len_torch_function_stack() == 0"
    )
    _run(["-c", program], **{emulation.VARIABLE: "1"})
