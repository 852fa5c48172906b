"""Disks that are full, fail or go away under a running engine: real files, the real policy, the real executor."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from doubles import Fault, MakeRig, Transfer, no_faults
from node import Node, mounted
from saria_vllm.policy.striping import FULL_PAUSE_MAX_S, PAUSE_S, READS_PAUSE_S
from saria_vllm.storage import segments as segments_module

MIB = 1 << 20


# B39: files and directories that vanish.


def filled(make_rig: MakeRig, **options: object) -> tuple[Node, list[list[bytes]]]:
    """A node with eight prefixes of a segment each, that DRAM has forgotten. Descriptors of sealed segments are not
    kept, so that files are looked for when they are read."""
    node = Node(make_rig, segments_max=200, segment_records=8, options=dict(options))
    prefixes = [node.store(8) for _ in range(8)]
    forget_dram(node)
    assert [node.load(keys) for keys in prefixes] == [8] * 8
    assert node.counts["load_bytes:ssd"] > 0
    return node, prefixes


@pytest.fixture(autouse=True)
def no_descriptors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", 0)


def forget_dram(node: Node) -> None:
    """Other prefixes take the DRAM."""
    for _ in range(7):
        node.store(8)


def test_b39_one_file_that_vanished_costs_its_chunks_only(make_rig: MakeRig) -> None:
    node, prefixes = filled(make_rig)
    forget_dram(node)
    files = sorted(node.directory.glob("r0/seg-*.data"))
    files[2].unlink()
    assert [node.load(keys) for keys in prefixes] == [8, 8, 0, 8, 8, 8, 8, 8]
    assert node.counts["errors:read_failed"] == 8
    assert node.counts["drive_errors:0"] == 8
    reads = node.rig.engines[0].submits["read"]
    assert node.load(prefixes[2]) == 0, "it is not offered again"
    assert node.rig.engines[0].submits["read"] == reads
    assert node.problems == []
    node.now += PAUSE_S
    kept = node.store(8)
    forget_dram(node)
    assert node.load(kept) == 8


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


def moved(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def replaced(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("a file")


def linked(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to("elsewhere")


@pytest.mark.parametrize("vanish", [removed, moved, replaced])
@pytest.mark.parametrize("first", ["read", "write"])
def test_b39_a_directory_that_vanished_turns_its_drive_off_with_one_line(
    make_rig: MakeRig, vanish: object, first: str
) -> None:
    node, prefixes = filled(make_rig)
    forget_dram(node)
    assert callable(vanish)
    vanish(node.directory)
    if first == "read":
        assert node.load(prefixes[0]) == 0
    else:
        node.store(8)
    assert len(node.problems) == 1
    assert "our directory is gone" in node.problems[0] and "SSD tier is off" in node.problems[0]
    for keys in prefixes:
        assert node.load(keys) == 0
    for _ in range(9):
        keys = node.store(8)
        assert node.load(keys) == 8, "DRAM goes on alone"
        node.now += 1000.0
    assert len(node.problems) == 1
    assert node.counts["errors:vanished"] >= 1
    assert "internal_errors" not in node.counts
    if vanish is moved:
        node.directory.with_name("elsewhere").rename(node.directory)
        forget_dram(node)
        assert node.load(prefixes[0]) == 0, "off until a restart"
        node.rig.executor.close()
        again = Node(make_rig, segments_max=200, segment_records=8)
        assert {len(again.load(keys) * b"x") for keys in prefixes} <= {0, 8}, "whole or not at all"


def test_b39_the_other_drive_goes_on(make_rig: MakeRig) -> None:
    node, _ = filled(make_rig, drives=2)
    forget_dram(node)
    shutil.rmtree(node.rig.directory / "drive1")
    for _ in range(4):
        node.store(8)
    assert len(node.problems) == 1
    assert "off" not in node.problems[0].split(";")[0] and "SSD tier is off" not in node.problems[0]
    node.now += PAUSE_S
    keys = node.store(8)
    forget_dram(node)
    assert node.load(keys) == 8
    drives = node.tiers.chunks.index.extent[:, 0]
    assert set(drives[drives >= 0].tolist()) == {0}


def test_b39_files_that_go_while_they_are_retired(make_rig: MakeRig) -> None:
    node = Node(make_rig, segments_max=6, segment_records=8)
    for _ in range(20):
        node.store(8)
        for path in list(node.directory.glob("r0/seg-*.data"))[:1]:
            path.unlink()
    assert "internal_errors" not in node.counts
    node.now += PAUSE_S
    assert node.load(node.store(8)) == 8


def test_b39_files_that_cannot_be_removed_for_a_while_never_add_up(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where rights of the directory changed, and are given back: the cap holds all the time."""
    node = Node(make_rig, segments_max=4, segment_records=8)
    unlink, most = os.unlink, 0

    def refuse(path: str, **how: Any) -> None:
        if str(path).endswith(".data"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path, **how)

    for turn in range(30):
        with monkeypatch.context() as patch:
            if 8 <= turn < 20:
                patch.setattr(os, "unlink", refuse)
            node.store(8)
        node.now += 4 * PAUSE_S
        most = max(most, len(list(node.directory.glob("r0/seg-*.data"))))
    assert most == 4
    assert node.counts["drive_errors:0"] > 0
    assert node.load(node.store(8)) == 8
    forget_dram(node)
    assert node.load(node.store(8)) == 8


# EIO.


@pytest.mark.parametrize("kind", ["data", "journal"])
def test_a_directory_in_the_place_of_a_file_costs_one_segment_only(make_rig: MakeRig, kind: str) -> None:
    node = Node(make_rig, segments_max=200, segment_records=8)
    in_the_way = node.directory / "r0" / f"seg-{0:016x}.{kind}"
    in_the_way.mkdir()
    node.store(8)
    forget_dram(node)
    assert node.counts["errors:write_failed"] > 0
    node.now += PAUSE_S
    kept = node.store(8)
    forget_dram(node)
    assert node.load(kept) == 8
    assert list(in_the_way.iterdir()) == []


def test_eio_on_a_read_drops_the_whole_segment_and_a_second_one_stops_reads(make_rig: MakeRig) -> None:
    node, prefixes = filled(make_rig)
    forget_dram(node)
    before = set(node.directory.glob("r0/seg-*.data"))
    bad = 0

    def fail(transfer: Transfer) -> Fault | None:
        nonlocal bad
        if transfer.kind == "read" and bad:
            bad -= 1
            return Fault(result=-errno.EIO)
        return None

    node.rig.faults = fail
    bad = 1
    assert node.load(prefixes[0]) in range(8)
    assert node.load(prefixes[0]) == 0, "none of its chunks is offered"
    assert node.tiers.chunks.extents is not None
    node.settle()
    node.rig.check_quiet()
    assert len(before - set(node.directory.glob("r0/seg-*.data"))) == 1, "its file is gone"
    assert node.load(prefixes[1]) == 8
    bad = 1
    assert node.load(prefixes[2]) < 8
    assert node.load(prefixes[3]) == 0, "nothing is read for a while"
    node.now += READS_PAUSE_S
    assert node.load(prefixes[3]) == 8
    assert node.counts["drive_errors:0"] == 2
    assert node.counts["drive_pauses:0"] >= 2


def test_eio_on_writes_is_no_wrong_byte_and_the_drive_is_left_alone_ever_longer(make_rig: MakeRig) -> None:
    node = Node(make_rig, segments_max=200, segment_records=8)
    node.rig.faults = lambda transfer: Fault(result=-errno.EIO) if transfer.kind == "write" else None
    writes = []
    for _ in range(40):
        node.load(node.store(8))
        writes.append(node.rig.engines[0].submits["write"])
        node.now += 10.0
    assert len(set(writes)) <= 7, "400 s: tried after 0, 10, 30, 70, 150 and 310"
    assert node.counts["drive_pauses:0"] <= 7
    assert not list(node.directory.glob("r0/seg-*"))
    node.rig.faults = no_faults
    node.now += 400.0
    keys = node.store(8)
    forget_dram(node)
    assert node.load(keys) == 8


# B40: full.


@pytest.mark.parametrize("segment_records", [31, pytest.param(255, marks=pytest.mark.slow)], ids=["4MiB", "32MiB"])
def test_b40_a_disk_that_is_full_below_the_quota(make_rig: MakeRig, tmp_path: Path, segment_records: int) -> None:
    """A quota of 1 GiB on 64 MiB; somebody else takes 90 % of it for a time."""
    with mounted("tmpfs", tmp_path, 64) as mount:
        segments_max = (1 << 30) // (segment_records * (128 << 10) + MIB)
        node = Node(make_rig, segments_max, segment_records, options={"directory": mount})
        try:
            first = node.store(8)
            ballast = mount / "ballast"
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, min(58 * MIB, os.statvfs(mount).f_bavail * 4096))
            for _ in range(12):
                assert node.load(node.store(16)) == 8
                node.now += 17.0
            assert node.counts["errors:disk_full"] > 0
            assert node.counts["drive_pauses:0"] > 0
            assert sum("(disk_full)" in message for message in node.rig.messages) == 1
            persisted = node.counts["persisted_chunks"]
            ballast.unlink()
            node.now += FULL_PAUSE_MAX_S
            recent = [node.store(16) for _ in range(4)]
            assert node.counts["persisted_chunks"] >= persisted + 64, "writes go on"
            for _ in range(30):
                node.store(16)
                node.now += 10.0
            assert node.counts["retired_chunks"] > 0, "own old segments made room"
            for keys in [first, *recent]:
                node.load(keys)  # Right, or not there.
            errors = node.counts["errors:disk_full"]
            node.rig.executor.close()
            again = Node(make_rig, segments_max, segment_records, options={"directory": mount})
            assert len(again.opened.found) > 100
            for chunk in again.opened.found.items:
                assert again.load([chunk.key]) == 1, "no torn entry is visible"
            again.rig.executor.close()
            assert errors < 400
        finally:
            node.rig.executor.close()


def test_b40_a_disk_smaller_than_the_quota_is_used_as_far_as_it_goes(make_rig: MakeRig, tmp_path: Path) -> None:
    """When it is found to be full the oldest goes for the newest, without an error each time."""
    with mounted("tmpfs", tmp_path, 16) as mount:
        node = Node(make_rig, 256, 7, options={"directory": mount})
        try:
            for _ in range(50):
                node.store(8)
                node.now += 2.0
            assert node.counts["persisted_chunks"] > 0.6 * 50 * 8
            assert 1 <= node.counts["drive_pauses:0"] <= 3
            assert node.du() > 12 * MIB
        finally:
            node.rig.executor.close()
