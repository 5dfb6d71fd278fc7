"""Write the documents that follow from the code: configuration.md from the schema, errors.md from what modules raise.

    python docs/generate.py            # write them
    python docs/generate.py --check    # exit code 1 if one is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright import errors
from shardwright.config.schema import reference

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "shardwright"

AREAS = {
    "config": "Configuration",
    "launch": "Launching",
    "cli": "Command line",
    "estimator": "Estimator",
    "topology": "Ranks and groups",
    "transport": "Messages",
    "partition": "Partition",
    "pipeline": "Steps and the pipeline",
    "engine": "Model and optimizer wrappers",
    "tensor_parallel": "Tensor parallelism",
    "sharding": "Slices",
    "integrations": "Hugging Face",
    "data_parallel": "Data parallelism",
    "precision": "Precision",
    "optim": "Optimizers",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
    "torch": "The API module",
}
"""Package below `shardwright` -> heading; also the order."""


def configuration() -> str:
    lines = [
        "# Configuration reference",
        "",
        "Written by `docs/generate.py` from `shardwright.config.schema`. Keys go into the dict of `smp.init`, into the launcher"
        " (`shardwright run -o key=value`, `--config FILE.json`), or into the environment variable `SM_HP_MP_PARAMETERS`. *since*"
        " is the release of the original that had it.",
        "",
        "| key | values | default | since | meaning |",
        "|---|---|---|---|---|",
    ]
    for row in reference():
        names = "<br>".join(f"`{name}`" for name in (row.key, *row.aliases))
        lines.append(_row(names, row.values, f"`{row.default}`", row.since, row.doc))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Raised:
    """One place that raises: the kind of error, its message, and the remedy if it says one."""

    kind: str
    message: str
    remedy: str


def errors_raised() -> str:
    lines = [
        "# Errors",
        "",
        "Written by `docs/generate.py` from the source. Every error of the library derives from `shardwright.errors.ShardwrightError`,"
        " and says what happened, where (rank, microbatch, module), and what to try. What varies is in braces."
        " For symptoms see [troubleshooting.md](troubleshooting.md).",
    ]
    found = {area: sorted(_of_package(SOURCE / area), key=lambda r: (r.kind, r.message)) for area in AREAS}
    for area, heading in AREAS.items():
        if not found[area]:
            continue
        lines += ["", f"## {heading}", "", "| error | message | what to try |", "|---|---|---|"]
        lines += [_row(f"`{r.kind}`", r.message, r.remedy) for r in dict.fromkeys(found[area])]
    return "\n".join(lines) + "\n"


def _of_package(package: Path) -> Iterator[Raised]:
    for path in [*package.rglob("*.py"), package.with_suffix(".py")]:
        if not path.exists():
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args and _is_ours(call.func.id):
                remedy = next((k.value for k in call.keywords if k.arg == "remedy"), None)
                message = _words(call.args[0])
                if message != "...":
                    yield Raised(call.func.id, message, "" if remedy is None else _words(remedy))


def _is_ours(name: str) -> bool:
    kind = getattr(errors, name, None)
    return isinstance(kind, type) and issubclass(kind, errors.ShardwrightError)


def _words(node: ast.expr) -> str:
    """An expression as a reader sees it: literals, and names of what varies in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.replace("<", "\\<").split(" "))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_words(node.body)} / {_words(node.orelse)}"
    if isinstance(node, ast.FormattedValue):
        return _words(node.value) if isinstance(node.value, (ast.IfExp, ast.Constant)) else _placeholder(node.value)
    return "..."


def _placeholder(value: ast.expr) -> str:
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "{" + name.strip("_").lower() + "}"
        case ast.Call(func=ast.Name(id="list" | "str" | "repr" | "sorted" | "len"), args=[inner, *_]):
            return _placeholder(inner)
    return "{...}"


WRITERS = {"configuration.md": configuration, "errors.md": errors_raised}


def main(arguments: list[str]) -> int:
    stale = {name: text for name, write in WRITERS.items() if (text := write()) != _present(DOCS / name)}
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} is out of date: run `make docs`")
        return int(bool(stale))
    for name, text in stale.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


def _present(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
