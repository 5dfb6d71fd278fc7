"""Imports point down, siblings are strangers, and only two layers talk to other processes.

The table of layers is that of the architecture document. The imports are read from the source, lazy and
typing-only ones included; a subprocess shows that what must start without PyTorch does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

# Lowest row first. A package may import packages of lower rows; what shares a row are siblings.
ROWS: list[set[str]] = [
    {"errors", "log", "import_hooks"},
    {"config"},
    {"emulation"},
    {"sharding"},
    {"topology"},
    {"transport"},
    {"partition", "tensor_parallel", "data_parallel", "precision", "memory", "optim"},
    {"pipeline", "checkpoint"},
    {"engine"},
    {"integrations", "launch"},
    {"torch", "cli", "estimator"},
    {"smdistributed"},
]
HEIGHT = {package: height for height, row in enumerate(ROWS) for package in row}

# Techniques know each other through `engine` only, pipeline and checkpoint included, except for this pair.
TECHNIQUES = ROWS[6] | ROWS[7]
ACQUAINTED = {("pipeline", "partition")}

# Packages that start without PyTorch: nothing at module level may import it.
LIGHT = {"errors", "log", "import_hooks", "config", "launch", "cli", "estimator"}

# `emulation` wraps the functions that make groups, and calls none of them.
COMMUNICATING = {"topology", "transport", "emulation"}
# Parts of torch.distributed that bring their own communication, and who may use them.
FEATURE_PACKAGES = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
FEATURE_USERS = {"data_parallel", "tensor_parallel", "checkpoint"}
# What the other layers may read from torch.distributed: types and questions, never traffic or groups.
HARMLESS = {
    "GradBucket",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "get_backend",
    "get_rank",
    "get_world_size",
    "is_available",
    "is_initialized",
    "run",  # torchrun's command line, used by launch
    "elastic",  # torchrun's agent, used by launch
    "launcher",
    *(package.rpartition(".")[2] for package in FEATURE_PACKAGES),
}


@dataclass(frozen=True)
class Import:
    """One imported module or name, in absolute dotted form."""

    target: str
    line: int
    at_start: bool


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import of a file; `at_start` tells whether it runs when the file is imported."""
    lazy = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_typing_only(scope)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, id(node) not in lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for name in node.names:
                yield Import(f"{node.module}.{name.name}", node.lineno, id(node) not in lazy)


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def package_of(module: str) -> str | None:
    """The layer a dotted name belongs to: None for foreign code, "" for the root package itself."""
    parts = module.split(".")
    if parts[0] == "smdistributed":
        return "smdistributed"
    if parts[0] != "shardwright":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else ""


def layering_faults(package: str, source: str) -> list[str]:
    """Imports of a file of `package` that do not point down."""
    faults = []
    for imported in imports(ast.parse(source)):
        target = package_of(imported.target)
        if target in (None, "", package):
            continue
        techniques = {package, target} <= TECHNIQUES
        if package == "":
            faults.append(f"line {imported.line}: the root package imports {imported.target}")
        elif techniques and (package, target) not in ACQUAINTED:
            faults.append(f"line {imported.line}: {package} knows its sibling {target}")
        elif HEIGHT[target] >= HEIGHT[package]:
            faults.append(f"line {imported.line}: {package} imports {target}, which is not below it")
    return faults


def start_faults(source: str) -> list[str]:
    """Imports at module level that load PyTorch, directly or through a layer that does."""
    faults = []
    for imported in imports(ast.parse(source)):
        target = package_of(imported.target)
        heavy = target not in (None, "", *LIGHT) or imported.target.split(".")[0] == "torch"
        if imported.at_start and heavy:
            faults.append(f"line {imported.line}: {imported.target} is imported at start")
    return faults


def communication_faults(package: str, source: str) -> list[str]:
    """Uses of torch.distributed that create groups or move data outside topology and transport."""
    if package in COMMUNICATING:
        return []
    faults = []
    for line, used in distributed_uses(ast.parse(source)):
        feature = next((name for name in FEATURE_PACKAGES if f"{used}.".startswith(f"{name}.")), None)
        if feature is not None and package not in FEATURE_USERS:
            faults.append(f"line {line}: {package} uses {feature}")
        if feature is None and used.split(".")[2] not in HARMLESS:
            faults.append(f"line {line}: {package} uses {used}")
    return faults


def distributed_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file takes from torch.distributed, under any local name."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("torch.distributed."):
                    yield node.lineno, name.name
                aliases[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                aliases[name.asname or name.name] = full
                if full.startswith("torch.distributed."):
                    yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = _dotted(node, aliases)
            if full.startswith("torch.distributed.") and full.count(".") == 2:
                yield node.lineno, full


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


# -- the tree ----------------------------------------------------------------------------------------------


def test_every_package_has_a_row() -> None:
    packages = {path.stem if path.is_file() else path.name for path in (SRC / "shardwright").iterdir()}
    assert packages - {"__init__", "__pycache__", "py"} <= set(HEIGHT)


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_file_keeps_the_layers(path: Path) -> None:
    source = path.read_text()
    package = package_of(module_of(path)) or ""
    faults = layering_faults(package, source) + communication_faults(package, source)
    if package in LIGHT:
        faults += start_faults(source)
    assert not faults, f"{path.relative_to(SRC)}\n  " + "\n  ".join(faults)


def test_light_packages_start_without_torch() -> None:
    light = [module_of(path) for path in files() if package_of(module_of(path)) in {"", *LIGHT}]
    assert "shardwright.config.parse" in light
    program = f"""
import importlib, sys
for name in {light!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- the checks themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "source", "fault"),
    [
        ("config", "from shardwright.topology import ranks", "not below"),
        ("topology", "from shardwright.transport.p2p import isend", "not below"),
        ("errors", "from shardwright import log", "not below"),
        ("data_parallel", "from shardwright.partition.plan import PartitionPlan", "sibling"),
        ("pipeline", "from shardwright import checkpoint", "sibling"),
        ("checkpoint", "import shardwright.partition.plan", "sibling"),
        ("engine", "def f():\n    from shardwright.launch import process", "not below"),
        ("engine", "if TYPE_CHECKING:\n    import shardwright.torch", "not below"),
        ("torch", "import smdistributed.modelparallel", "not below"),
        ("", "from shardwright.config import parse", "root"),
    ],
)
def test_wrong_imports_are_found(package: str, source: str, fault: str) -> None:
    (found,) = layering_faults(package, source)
    assert fault in found


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("config", "from shardwright import errors, log"),
        ("pipeline", "from shardwright.partition.plan import PartitionPlan"),
        ("engine", "from shardwright import pipeline, checkpoint, __version__"),
        ("partition", "from shardwright.partition import tree\nimport torch.nn"),
        ("smdistributed", "import shardwright.torch"),
    ],
)
def test_right_imports_pass(package: str, source: str) -> None:
    assert layering_faults(package, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed\nif torch.distributed.broadcast(x, 0): pass",
        "from torch import distributed\ndistributed.new_group([0])",
        "from torch.distributed import isend",
        "from torch.distributed import distributed_c10d",
        "def f():\n    import torch.distributed as d\n    d.send(x, 1)",
        "import torch.distributed._functional_collectives as funcol",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
    ],
)
def test_communication_is_found(source: str) -> None:
    assert communication_faults("engine", source)
    assert communication_faults("transport", source) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("engine", "import torch.distributed as dist\ngroup: dist.ProcessGroup\ndist.is_initialized()"),
        ("data_parallel", "from torch.distributed.fsdp import fully_shard"),
        ("checkpoint", "import torch.distributed.checkpoint as dcp\ndcp.load(x)"),
        ("pipeline", "from shardwright.transport import collectives\ncollectives.all_reduce(x, 'dp')"),
    ],
)
def test_harmless_uses_pass(package: str, source: str) -> None:
    assert communication_faults(package, source) == []


@pytest.mark.parametrize(
    "source", ["import torch", "from torch import nn", "from shardwright.engine import model"]
)
def test_heavy_starts_are_found(source: str) -> None:
    assert start_faults(source)
    assert start_faults(f"def main():\n    {source}") == []
