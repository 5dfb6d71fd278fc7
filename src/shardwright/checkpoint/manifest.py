"""What is inside a checkpoint: the JSON file that is written last and makes it valid.

Version 2, one object:

    format, version    "shardwright checkpoint", 2; 1 where no slice has `at`, which is the only difference
    checksum           xxh3_128 over the canonical JSON of everything else
    kind               "partial"
    tag, save_id       the tag; a random id of this save
    saved_at_s         seconds since the epoch
    layout             pp, tp, rdp, placement, shard_optimizer_state, sharded_data_parallel_degree, precision
    versions           of shardwright, torch, python
    partition          the partition plan as JSON, or null with one stage
    ties               lists of names that are one tensor
    structure          modules and parameters of the model, see `partition.tree.to_record`; "scaled", names of parameters
                       that act on the samples of the whole tp group; "cuts", what tp ranks have slices of with any degree: name
                       to dim, elements of a unit that is never cut, units of queries that share it (`sharding.slices.Units`).
                       Names are those of the running model, also where the entries of a full checkpoint are translated to the
                       original's. null if unknown
    converted_from     of what was converted from another layout: that "layout", its "partition", and "cuts" over tp ranks (name
                       to dim and ranges); else null. Random state of its ranks lies in files with the role "origin_rng"
    param_groups       per optimizer group: plain names of all its parameters, unpartitioned order
    files              name -> bytes, xxh3_128, role, writer (world rank), and where it has been summed in blocks
                       "blocks": [bytes of a block, base64 of the big-endian xxh3_64 of each block in turn]
    data_folder        where the files lie: a folder beside the manifest, or "" for its own (see storage.remote)
    origin             what the model was before its modules were replaced, for readers that give it back that form; or null:
                       architecture, config, generation_config of transformers, renamings (path, rules of names); in a full
                       checkpoint of the original's names, where those are [], "running": the renamings, "names" and "ties" of
                       the running model
    entries            one per model tensor and per optimizer state value:
      role             "model", "optimizer", "fp16_states"
      name             plain name of the parameter or buffer
      state            null for the model; else the state's name ("exp_avg"; nested ones joined by "/")
      shape, dtype     of the whole tensor; dtype "object" for a value that isn't a tensor
      slices           [file, key] for a whole copy, or [file, key, offset, shape] for the part of the
                       whole tensor it is; key: the path of dict keys and list indices inside the loaded file;
                       [file, key, offset, shape, span] for a piece of that part, which is stored with one dim:
                       span is [start, stop], elements of the part in row-major order, or [start, stop, strides]
                       in the order of memory that the strides give, or [start, stop, strides or null, at]
                       where the piece begins at element `at` of a stored tensor that holds others as well

Readers ignore fields they don't know and refuse a version they don't know.
Source: design.md section 6.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import xxhash

from shardwright.checkpoint.layout import Layout, Role, StateRole
from shardwright.errors import CheckpointError

FORMAT = "shardwright checkpoint"
VERSION = 2
OBJECT = "object"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Slice:
    """One stored copy of a part of a tensor. offset, shape: in the whole tensor, elements per dim.

    span: of a piece of that part, [start, stop) elements of it in row-major order, or in that of `strides`.
    at: the element of the stored tensor, which has one dim, where the piece begins.
    """

    file: str
    key: KeyPath
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    span: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None
    at: int = 0


@dataclass(frozen=True)
class Entry:
    """One tensor (or plain value) of the model or of the optimizer state, and everywhere it is stored."""

    role: StateRole
    name: str
    state: str | None
    shape: tuple[int, ...]
    dtype: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Blocks:
    """Digests of a file cut into blocks of `num_bytes` (the last one may be shorter), so that a part of it can be checked.

    digests: xxh3_64 of each, 8 bytes, back to back.
    """

    num_bytes: int
    digests: bytes

    def digest(self, index: int) -> bytes:
        """That of one block."""
        return self.digests[8 * index : 8 * index + 8]


@dataclass(frozen=True)
class FileRecord:
    """One file: size_bytes, digest (xxh3_128, hex), what it holds, the world rank that wrote it, and sums of its blocks."""

    size_bytes: int
    digest: str
    role: Role
    writer: int
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json; see the module's description for each field."""

    tag: str
    save_id: str
    saved_at_s: int
    layout: Layout
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    entries: tuple[Entry, ...]
    partition: Mapping[str, Any] | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    param_groups: tuple[tuple[str, ...], ...] = ()
    kind: Literal["partial", "full"] = "partial"
    data_folder: str = ""
    structure: Mapping[str, Any] | None = None
    converted_from: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        """Return the JSON text of the file, checksum included."""
        body = {
            "format": FORMAT,
            "version": VERSION if any(part.at for entry in self.entries for part in entry.slices) else 1,
            "kind": self.kind,
            "tag": self.tag,
            "save_id": self.save_id,
            "saved_at_s": self.saved_at_s,
            "layout": asdict(self.layout),
            "versions": dict(self.versions),
            "partition": self.partition,
            "ties": self.ties,
            "param_groups": self.param_groups,
            "structure": self.structure,
            "converted_from": self.converted_from,
            "origin": self.origin,
            "files": {name: _file_to_json(record) for name, record in self.files.items()},
            "data_folder": self.data_folder,
            "entries": [_entry_to_json(entry) for entry in self.entries],
        }
        return json.dumps({"checksum": _checksum(body), **body}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Manifest:
        """Read a manifest; `where` names the file in errors.

        Raises: CheckpointError if it is cut, changed, of another format, or of a version this release doesn't
            know.
        """
        try:
            body = json.loads(data)
        except ValueError as error:
            raise CheckpointError(f"the manifest is cut or changed: {error}", where=where) from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError("the manifest isn't one of this library", where=where)
        if body.get("version") not in range(1, VERSION + 1):
            raise CheckpointError(
                f"the manifest has version {body.get('version')!r}, this release reads versions up to {VERSION}",
                where=where,
                remedy="load the checkpoint with the release of shardwright that wrote it, or a later one",
            )
        claimed = body.pop("checksum", None)
        if claimed != _checksum(body):
            raise CheckpointError(
                f"the manifest is changed: its checksum is {_checksum(body)}, it says {claimed}", where=where
            )
        try:
            return cls(
                tag=str(body["tag"]),
                save_id=str(body["save_id"]),
                saved_at_s=int(body["saved_at_s"]),
                layout=Layout.from_record(body["layout"]),
                versions=body["versions"],
                files={_plain(name): _file_from_json(f) for name, f in body["files"].items()},
                entries=tuple(_entry_from_json(entry) for entry in body["entries"]),
                partition=body["partition"],
                ties=tuple(tuple(names) for names in body["ties"]),
                param_groups=tuple(tuple(names) for names in body["param_groups"]),
                kind=body["kind"],
                data_folder=_plain(body["data_folder"]) if body.get("data_folder") else "",
                structure=body.get("structure"),
                converted_from=body.get("converted_from"),
                origin=body.get("origin"),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"the manifest has an unexpected content: {type(error).__name__}: {error}", where=where
            ) from error

    def names(self, role: StateRole) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor of a role by plain name (for the model: one per entry)."""
        return {entry.name: entry.shape for entry in self.entries if entry.role == role}

    def role_of(self, role: Role) -> str | None:
        """The first file of a role; None if there is none."""
        return next((name for name, record in self.files.items() if record.role == role), None)

    def has(self, role: Role) -> bool:
        """True if at least one file of this role was written."""
        return any(record.role == role for record in self.files.values())


def merge_entries(per_rank: Iterable[Sequence[Entry]]) -> tuple[Entry, ...]:
    """Join the entries that each rank reports for what it wrote: one per tensor, with the slices of all
    ranks.

    Raises: CheckpointError if two ranks report one tensor with different shapes or dtypes.
    """
    merged: dict[tuple[str, str, str | None], Entry] = {}
    for entries in per_rank:
        for entry in entries:
            key = (entry.role, entry.name, entry.state)
            known = merged.get(key)
            if known is None:
                merged[key] = entry
                continue
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                label = entry.name if entry.state is None else f"{entry.name} ({entry.state})"
                raise CheckpointError(
                    f"ranks disagree about {label!r}: {known.dtype} {list(known.shape)} in "
                    f"{known.slices[0].file}, {entry.dtype} {list(entry.shape)} in {entry.slices[0].file}"
                )
            merged[key] = Entry(*key, known.shape, known.dtype, known.slices + entry.slices)
    return tuple(merged.values())


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _plain(name: str) -> str:
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError(f"{name!r} isn't a plain file name")
    return name


def _file_to_json(record: FileRecord) -> dict[str, Any]:
    told = {"bytes": record.size_bytes, "xxh3_128": record.digest, "role": record.role, "writer": record.writer}
    if record.blocks is None:
        return told
    return {**told, "blocks": [record.blocks.num_bytes, base64.b64encode(record.blocks.digests).decode()]}


def _file_from_json(data: Mapping[str, Any]) -> FileRecord:
    size_bytes, blocks = int(data["bytes"]), None
    if "blocks" in data:
        blocks = Blocks(int(data["blocks"][0]), base64.b64decode(data["blocks"][1]))
        if len(blocks.digests) != 8 * -(-size_bytes // blocks.num_bytes):
            raise ValueError(f"{len(blocks.digests) // 8} digests of blocks for {size_bytes} bytes")
    return FileRecord(size_bytes, str(data["xxh3_128"]), data["role"], int(data["writer"]), blocks)


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    slices: list[list[Any]] = []
    for part in entry.slices:
        told: list[Any] = [part.file, part.key]
        if part.shape != entry.shape or part.span is not None:
            told += [part.offset, part.shape]
        if part.span is not None:
            rest = (part.strides, part.at) if part.at else () if part.strides is None else (part.strides,)
            told.append((*part.span, *rest))
        slices.append(told)
    return {
        "role": entry.role,
        "name": entry.name,
        "state": entry.state,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "slices": slices,
    }


def _entry_from_json(data: Mapping[str, Any]) -> Entry:
    shape = tuple(int(size) for size in data["shape"])
    slices = []
    for part in data["slices"]:
        file, key = _plain(part[0]), tuple(part[1])
        offset, size = (part[2], part[3]) if len(part) > 2 else ([0] * len(shape), shape)
        span = part[4] if len(part) > 4 else None
        start_stop = None if span is None else (int(span[0]), int(span[1]))
        strides = tuple(span[2]) if span is not None and len(span) > 2 and span[2] is not None else None
        at = int(span[3]) if span is not None and len(span) > 3 else 0
        slices.append(Slice(file, key, tuple(offset), tuple(size), start_stop, strides, at))
    role = cast(StateRole, data["role"])
    return Entry(role, str(data["name"]), data["state"], shape, str(data["dtype"]), tuple(slices))
