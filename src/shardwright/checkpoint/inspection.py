"""Looking at checkpoints without a job: what a folder holds, whether it is whole, how two differ. No process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.checkpoint import folder, full_files, integrity, layout, plan
from shardwright.checkpoint.manifest import OBJECT, Entry, Manifest
from shardwright.checkpoint.reader import Reader
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError, CheckpointNotFoundError


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a folder.

    name: of the folder or file.   manifest: None if it is unusable.   problems: what can be seen without reading it.
    elsewhere: files that have another name while a save replaces them.
    """

    root: Place
    name: str
    kind: str
    manifest: Manifest | None
    problems: tuple[integrity.Problem, ...]
    is_newest: bool
    elsewhere: Mapping[str, Place] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.manifest is not None and not integrity.harmful(self.problems)

    @property
    def num_bytes(self) -> int:
        """Of the files that the manifest lists."""
        return 0 if self.manifest is None else sum(record.size_bytes for record in self.manifest.files.values())

    @property
    def place(self) -> Place:
        """The folder of its files."""
        place = folder.existing(self.root, self.name) if self.kind == "partial" else self.root
        return place if self.manifest is None else integrity.data_place(place, self.manifest)

    def reader(self, *, trust: bool) -> Reader:
        """Its files."""
        return Reader(self.place, trust=trust, elsewhere=self.elsewhere)


def checkpoints(root: Place) -> list[Checkpoint]:
    """All checkpoints of a folder, the oldest first; incomplete ones too.

    Raises: CheckpointNotFoundError if it is no folder.
    """
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is no folder", remedy="give the folder that was passed to save_checkpoint")
    newest = ""
    if (root / layout.NEWEST).is_file():
        newest = (root / layout.NEWEST).read_text(errors="replace").strip()
    found = []
    for kept in folder.partial_checkpoints(root):
        manifest, problems = integrity.inspect(folder.existing(root, kept.folder))
        found.append(Checkpoint(root, kept.folder, "partial", manifest, tuple(problems), kept.folder == newest))
    for tag in full_files.tags(root):
        manifest, problems, elsewhere = full_files.inspect(root, tag, checksums=False)
        found.append(Checkpoint(root, tag, "full", manifest, tuple(problems), tag == newest, elsewhere))
    return sorted(found, key=lambda c: (c.manifest.saved_at_s if c.manifest else 0, c.name))


def find(root: Place, tag: str | None) -> Checkpoint:
    """The checkpoint of a tag, with or without "_partial"; without a tag the one that `newest` names.

    Raises: CheckpointNotFoundError listing what there is.
    """
    everything = checkpoints(root)
    for checkpoint in everything:
        names = (checkpoint.name, checkpoint.name.removesuffix(layout.PARTIAL_SUFFIX))
        if checkpoint.is_newest if tag is None else tag in names:
            return checkpoint
    what = f"no checkpoint {tag!r} in {root}" if tag else f"{root / layout.NEWEST} names no checkpoint of this folder"
    raise CheckpointNotFoundError(what, remedy=f"one of {', '.join(c.name for c in everything) or 'none'}")


def verify(checkpoint: Checkpoint) -> list[integrity.Problem]:
    """Read all files and compare them with the manifest. Returns what is wrong, "extra" files included."""
    if checkpoint.kind == "partial":
        return integrity.verify(folder.existing(checkpoint.root, checkpoint.name))
    return full_files.inspect(checkpoint.root, checkpoint.name, checksums=True)[1]


def usable_manifest(checkpoint: Checkpoint) -> Manifest:
    """Its manifest. Raises: CheckpointError if it has no usable one."""
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{checkpoint.name} can't be read: {checkpoint.problems[0] if checkpoint.problems else 'no manifest'}",
            where=str(checkpoint.root),
        )
    return checkpoint.manifest


def whole_tensors(
    checkpoint: Checkpoint, *, trust: bool = False, wanted: Callable[[Entry], bool] = lambda entry: True
) -> Iterator[tuple[Entry, Tensor]]:
    """Every tensor of the model and of the optimizer, whole, one at a time.

    trust: read files that could run code.   wanted: which of them.
    """
    reader = checkpoint.reader(trust=trust)
    for entry in usable_manifest(checkpoint).entries:
        if entry.dtype != OBJECT and wanted(entry):
            yield entry, _whole(reader, entry)


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ. largest: of the absolute differences of values, None for other kinds."""

    what: str
    detail: str
    largest: float | None = None


def label(entry: Entry) -> str:
    """What to call a tensor: its name, and what it is of the optimizer."""
    return entry.name if entry.state is None else f"{entry.name} [{entry.state}]"


def differences(one: Checkpoint, other: Checkpoint, *, trust: bool = False) -> Iterator[Difference]:
    """Compare two checkpoints tensor by tensor, whatever their layouts; one tensor of each is held at a time."""
    manifests = usable_manifest(one), usable_manifest(other)
    tables = [{label(e): e for e in manifest.entries if e.dtype != OBJECT} for manifest in manifests]
    for name in sorted(tables[0].keys() - tables[1].keys()):
        yield Difference(name, f"only in {one.name}")
    for name in sorted(tables[1].keys() - tables[0].keys()):
        yield Difference(name, f"only in {other.name}")
    readers = one.reader(trust=trust), other.reader(trust=trust)
    for name, entry in tables[0].items():
        counterpart = tables[1].get(name)
        if counterpart is None:
            continue
        if (entry.shape, entry.dtype) != (counterpart.shape, counterpart.dtype):
            shown = [f"{e.dtype} {list(e.shape)}" for e in (entry, counterpart)]
            yield Difference(name, f"{shown[0]} and {shown[1]}")
            continue
        a, b = (_whole(reader, e) for reader, e in zip(readers, (entry, counterpart), strict=True))
        if not torch.equal(a, b):
            largest = float((a.double() - b.double()).abs().max())
            num = int((a != b).sum())
            yield Difference(name, f"{num} of {a.numel()} elements differ, by at most {largest:.3g}", largest)


def _whole(reader: Reader, entry: Entry) -> Tensor:
    zeros = (0,) * len(entry.shape)
    made = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    reader.fill(made, zeros, plan.plan(entry, [plan.box_of(zeros, entry.shape)]))
    return made
