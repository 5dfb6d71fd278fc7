"""The manifest: what is written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.manifest import Entry, FileRecord, Manifest, Slice, merge_entries
from shardwright.checkpoint.plan import plan
from shardwright.errors import CheckpointError


def example() -> Manifest:
    whole = Entry(
        "model", "a.weight", None, (4, 3), "float32", (Slice("model_0_0.pt", ("a.weight",), (0, 0), (4, 3)),)
    )
    sliced = Entry(
        "optimizer",
        "b.weight",
        "exp_avg",
        (4, 3),
        "bfloat16",
        (
            Slice("optimizer_0_0.pt", ("state", 1, "exp_avg"), (0, 0), (2, 3)),
            Slice("optimizer_0_1.pt", ("state", 0, "exp_avg"), (2, 0), (2, 3)),
        ),
    )
    pieces = Entry(
        "optimizer",
        "c.weight",
        "exp_avg",
        (4, 3),
        "float32",
        (
            Slice("optimizer_0_0_0.pt", ("state", 2, "exp_avg"), (0, 0), (4, 3), (0, 5)),
            Slice("optimizer_0_0_1.pt", ("state", 2, "exp_avg"), (0, 0), (4, 3), (5, 12), (1, 4)),
        ),
    )
    return Manifest(
        tag="step_4",
        save_id="abc",
        saved_at_s=1_700_000_000,
        layout=Layout(2, 2, 1, "spread"),
        versions={"shardwright": "0.1.0", "torch": "2.13.0"},
        files={"model_0_0.pt": FileRecord(100, "ff", "model", 0), "rng_1.pt": FileRecord(7, "ee", "rng", 1)},
        entries=(whole, sliced, pieces),
        partition={"stage_of": {"": 0, "a": 1}, "cost": 0.25},
        ties=(("a.weight", "b.weight"),),
        param_groups=(("a.weight",), ("b.weight",)),
    )


def test_round_trip() -> None:
    manifest = example()
    assert Manifest.from_bytes(manifest.to_bytes(), where="x") == manifest


def test_a_piece_inside_of_a_stored_tensor() -> None:
    """Releases that know nothing of `at` would read other elements, so they are told another version."""
    plain, key = example(), ("fp32_flat_groups", 0)
    pieces = [Slice(f"optimizer_{r}.pt", key, (0, 0), (4, 3), span, at=at) for r, (span, at) in enumerate([((0, 6), 9), ((6, 12), 0)])]
    strided = Slice("optimizer_2.pt", key, (0, 0), (4, 3), (2, 5), (1, 4), 7)
    entry = Entry("model", "d.weight", None, (4, 3), "float32", (*pieces, strided))
    manifest = dataclasses.replace(plain, entries=(*plain.entries, entry))
    assert Manifest.from_bytes(manifest.to_bytes(), where="x") == manifest
    assert [json.loads(m.to_bytes())["version"] for m in (plain, manifest)] == [1, 2]
    assert [(copy.box, copy.source.flat) for copy in plan(entry, [((1, 3), (0, 3))])] == [
        (((1, 2), (0, 3)), 9),
        (((2, 3), (0, 3)), 0),
    ]


def test_a_whole_slice_is_stored_short() -> None:
    entries = json.loads(example().to_bytes())["entries"]
    assert entries[0]["slices"] == [["model_0_0.pt", ["a.weight"]]]
    assert entries[1]["slices"][1] == ["optimizer_0_1.pt", ["state", 0, "exp_avg"], [2, 0], [2, 3]]
    assert entries[2]["slices"][0] == ["optimizer_0_0_0.pt", ["state", 2, "exp_avg"], [0, 0], [4, 3], [0, 5]]
    assert entries[2]["slices"][1][4] == [5, 12, [1, 4]]


def test_every_cut_and_every_flipped_byte_is_noticed() -> None:
    data = example().to_bytes()
    for position in range(0, len(data), 7):
        with pytest.raises(CheckpointError, match="manifest"):
            Manifest.from_bytes(data[:position], where="there")
        changed = bytearray(data)
        changed[position] ^= 0x04
        with pytest.raises(CheckpointError, match="manifest"):
            Manifest.from_bytes(bytes(changed), where="there")


def test_another_version_is_refused_by_number() -> None:
    body = json.loads(example().to_bytes())
    body["version"] = 3
    with pytest.raises(CheckpointError, match="version 3, this release reads versions up to 2"):
        Manifest.from_bytes(json.dumps(body).encode(), where="x")


def test_unknown_fields_are_ignored(resealed) -> None:  # type: ignore[no-untyped-def]
    assert Manifest.from_bytes(resealed(example(), colour="red"), where="x") == example()


def test_file_names_stay_inside_the_folder(resealed) -> None:  # type: ignore[no-untyped-def]
    files = {"../model_0_0.pt": {"bytes": 1, "xxh3_128": "0", "role": "model", "writer": 0}}
    with pytest.raises(CheckpointError, match=r"'../model_0_0.pt' isn't a plain file name"):
        Manifest.from_bytes(resealed(example(), files=files), where="x")


def test_a_missing_field_is_named(resealed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match="layout"):
        Manifest.from_bytes(resealed(example(), without="layout"), where="x")


def test_merging_joins_the_slices_of_all_ranks() -> None:
    def part(file: str, offset: int) -> Entry:
        return Entry("model", "w", None, (4,), "float32", (Slice(file, ("w",), (offset,), (2,)),))

    other = Entry("model", "b", None, (1,), "float32", (Slice("m0", ("b",), (0,), (1,)),))
    merged = merge_entries([[part("m0", 0), other], [part("m1", 2)]])
    assert [entry.name for entry in merged] == ["w", "b"]
    assert [piece.file for piece in merged[0].slices] == ["m0", "m1"]


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    one = Entry("model", "w", None, (4,), "float32", (Slice("m0", ("w",), (0,), (4,)),))
    two = Entry("model", "w", None, (5,), "float32", (Slice("m1", ("w",), (0,), (5,)),))
    with pytest.raises(CheckpointError, match=r"'w'.*\[4\] in m0.*\[5\] in m1"):
        merge_entries([[one], [two]])
