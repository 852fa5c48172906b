"""Kinds of damage to an engine's directory, each with what must be found of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from live_engine import NAME, PARTS, SHAPES, LiveEngine
from saria_vllm.storage import format as fmt
from saria_vllm.storage.namespace import Generation, namespace_name, pack_generation
from saria_vllm.storage.recovery import SEGMENT_ID_END, data_name, journal_name
from saria_vllm.types import Extent


class Place(NamedTuple):
    """A healthy directory, to be damaged."""

    root: Path

    @property
    def top(self) -> Path:
        return self.root / "saria"

    @property
    def namespace(self) -> Path:
        return self.top / NAME

    @property
    def engine(self) -> Path:
        return self.namespace / "e0"

    @property
    def rank(self) -> Path:
        return self.engine / "r0"

    def data(self, segment: int) -> Path:
        return self.rank / data_name(segment)

    def journal(self, segment: int) -> Path:
        return self.rank / journal_name(segment)


# Damage. Each says what must be found, as (kind, path below the engine's rank directory or SSD path, record), and
# whether it can be dropped.


def patch(path: Path, offset: int, data: bytes | None = None) -> None:
    """Overwrite bytes, or flip a bit of one."""
    with path.open("r+b") as file:
        file.seek(offset)
        data = data if data is not None else bytes([file.read(1)[0] ^ 4])
        file.seek(offset)
        file.write(data)


Found = list[tuple[str, str, int | None]]


def offset_of(group: int, record: int) -> int:
    return fmt.record_offset(SHAPES[group].record_bytes, record)


def flipped_payload(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 5) + 1000)
    return [("record", "r0/" + data_name(0), 5)]


def flipped_payload_of_an_open_segment(place: Place) -> Found:
    patch(place.data(2), offset_of(0, 2) + 4095)
    return [("record", "r0/" + data_name(2), 2)]


def flipped_padding(place: Place) -> Found:
    patch(place.data(1), offset_of(1, 3) + 10_001)
    return [("record", "r0/" + data_name(1), 3)]


def swapped_records(place: Place) -> Found:
    data = place.data(0).read_bytes()
    one, two = (data[offset_of(0, record) :][:4096] for record in (3, 7))
    patch(place.data(0), offset_of(0, 3), two)
    patch(place.data(0), offset_of(0, 7), one)
    return [("record", "r0/" + data_name(0), 3), ("record", "r0/" + data_name(0), 7)]


def lost_write(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 0), bytes(4096))
    return [("record", "r0/" + data_name(0), 0)]


def misplaced_write(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 1), place.data(2).read_bytes()[offset_of(0, 1) :][:4096])
    return [("record", "r0/" + data_name(0), 1)]


def torn_write(place: Place) -> Found:
    patch(place.data(1), offset_of(1, 2) + 8192, bytes(4096))
    return [("record", "r0/" + data_name(1), 2)]


def flipped_header(place: Place) -> Found:
    patch(place.data(0), 3000)
    return [("header", "r0/" + data_name(0), None)]


def no_header(place: Place) -> Found:
    patch(place.data(2), 0, bytes(4096))
    return [("header", "r0/" + data_name(2), None)]


def empty_file(place: Place) -> Found:
    os.truncate(place.data(0), 0)
    return [("header", "r0/" + data_name(0), None)]


def cut_file(place: Place) -> Found:
    os.truncate(place.data(0), place.data(0).stat().st_size - 1)
    return [("size", "r0/" + data_name(0), None)]


def long_file(place: Place) -> Found:
    os.truncate(place.data(1), place.data(1).stat().st_size + 4096)
    return [("size", "r0/" + data_name(1), None)]


def renamed_file(place: Place) -> Found:
    place.data(0).rename(place.data(9))
    return [("store", "r0/" + data_name(9), None)]


def file_of_another_rank(place: Place) -> Found:
    (place.engine / "r1").mkdir(mode=0o700)
    place.data(0).rename(place.engine / "r1" / data_name(0))
    return [("store", "r1/" + data_name(0), None)]


def header_of(place: Place, segment: int) -> fmt.Header:
    return fmt.parse_header(place.data(segment).read_bytes()[: fmt.HEADER_BYTES])


def other_format_version(place: Place) -> Found:
    header = header_of(place, 0)
    with pytest.MonkeyPatch.context() as change:
        change.setattr(fmt, "FORMAT_VERSION", fmt.FORMAT_VERSION + 1)
        later = fmt.pack_header(header)
    patch(place.data(0), 0, later)
    return [("version", "r0/" + data_name(0), None)]


def unknown_group(place: Place) -> Found:
    patch(place.data(0), 0, fmt.pack_header(header_of(place, 0)._replace(group=7)))
    return [("group", "r0/" + data_name(0), None)]


def size_of_another_group(place: Place) -> Found:
    patch(place.data(0), 0, fmt.pack_header(header_of(place, 0)._replace(group=1)))
    return [("group", "r0/" + data_name(0), None)]


def huge_counts(place: Place) -> Found:
    header = header_of(place, 0)._replace(records_max=2**32 - 1)
    patch(place.data(0), 0, fmt.pack_header(header))
    os.truncate(place.data(0), min(fmt.data_file_bytes(4096, header.records_max), 2**43))
    return [("size", "r0/" + data_name(0), None)]


def flipped_index(place: Place) -> Found:
    patch(place.data(0), place.data(0).stat().st_size - 4000)
    return [("index", "r0/" + data_name(0), None)]


def no_index(place: Place) -> Found:
    patch(place.data(0), place.data(0).stat().st_size - 4096, bytes(4096))
    return [("index", "r0/" + data_name(0), None)]


def no_journal(place: Place) -> Found:
    place.journal(2).unlink()
    return [("index", "r0/" + data_name(2), None)]


def torn_journal(place: Place) -> Found:
    with place.journal(2).open("ab") as file:
        file.write(b"half an entry")
    return [("journal", "r0/" + journal_name(2), None)]


def flipped_journal(place: Place) -> Found:
    patch(place.journal(2), fmt.ENTRY_BYTES + 40)
    return [("journal", "r0/" + journal_name(2), None)]


def endless_journal(place: Place) -> Found:
    os.truncate(place.journal(2), 2**42)
    return [("journal", "r0/" + journal_name(2), None)]


def orphan_journal(place: Place) -> Found:
    place.data(2).unlink()
    return [("orphan", "r0/" + journal_name(2), None)]


def data_is_a_symlink(place: Place) -> Found:
    place.data(0).rename(place.root / "elsewhere")
    place.data(0).symlink_to(place.root / "elsewhere")
    return [("symlink", "r0/" + data_name(0), None)]


def data_is_a_fifo(place: Place) -> Found:
    place.data(0).unlink()
    os.mkfifo(place.data(0), 0o600)
    return [("special", "r0/" + data_name(0), None)]


def data_is_a_socket(place: Place) -> Found:
    place.data(0).unlink()
    before = os.getcwd()
    os.chdir(place.rank)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(data_name(0))
    finally:
        os.chdir(before)
    return [("special", "r0/" + data_name(0), None)]


def data_is_a_directory(place: Place) -> Found:
    place.data(0).unlink()
    place.data(0).mkdir()
    return [("special", "r0/" + data_name(0), None)]


def journal_is_a_fifo(place: Place) -> Found:
    os.mkfifo(place.journal(0), 0o600)
    return [("special", "r0/" + journal_name(0), None)]


def open_mode(place: Place) -> Found:
    place.data(0).chmod(0o644)
    return [("mode", "r0/" + data_name(0), None)]


def open_small_files(place: Place) -> Found:
    for path in (place.engine / "lease", place.engine / "generation", place.top / "endurance-e0.json"):
        path.chmod(0o640)
    return [("mode", "lease", None), ("mode", "generation", None), ("mode", "saria/endurance-e0.json", None)]


def open_directories(place: Place) -> Found:
    for path in (place.top, place.namespace, place.engine, place.rank):
        path.chmod(0o755)
    return [("mode", "saria", None), ("mode", f"saria/{NAME}", None), ("mode", "", None), ("mode", "r0", None)]


def foreign_files(place: Place) -> Found:
    for folder in (place.top, place.namespace, place.engine, place.rank):
        (folder / "\x1b[31mred").write_text("x")
    (place.rank / data_name(SEGMENT_ID_END)).write_text("x")
    return [
        ("foreign", "saria", None),
        ("foreign", f"saria/{NAME}", None),
        ("foreign", "", None),
        ("foreign", "r0", None),
    ]


def no_lease(place: Place) -> Found:
    (place.engine / "lease").unlink()
    return [("lease", "lease", None)]


def lease_is_a_symlink(place: Place) -> Found:
    (place.engine / "lease").unlink()
    (place.engine / "lease").symlink_to("generation")
    return [("symlink", "lease", None)]


def damaged_generation(place: Place) -> Found:
    patch(place.engine / "generation", 16)
    return [("generation", "generation", None)]


def no_generation(place: Place) -> Found:
    (place.engine / "generation").unlink()
    return [("generation", "generation", None)]


def generation_of_before(place: Place) -> Found:
    engine = LiveEngine([str(place.root)])
    engine.reset()
    engine.fill(5)
    engine.directory.release()
    (place.engine / "generation").write_text(pack_generation(Generation(1, False)))
    return [("generation", "generation", None)]


def damaged_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").write_text(json.dumps(PARTS).replace("tiny", "tony"))
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def endless_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").write_text("[" * 100_000)
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def no_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").unlink()
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def damaged_endurance(place: Place) -> Found:
    patch(place.top / "endurance-e0.json", 3)
    return [("endurance", "saria/endurance-e0.json", None)]


def temporary_files(place: Place) -> Found:
    found: Found = []
    for path in (
        place.rank / "probe", place.engine / "generation.new", place.namespace / "namespace.json.new",
        place.top / "endurance-e0.json.new",
    ):  # fmt: skip
        path.touch(mode=0o600)
        os.utime(path, (1, 1))
        name = str(path.relative_to(place.engine if path.is_relative_to(place.engine) else place.root))
        found.append(("temporary", name, None))
    return found


def key_twice(place: Place) -> None:
    """As a second chance leaves it."""
    engine = LiveEngine([str(place.root)])
    engine.write(b"0-0-4", Extent(0, 5, 0))
    engine.directory.release()


def rank_is_a_symlink(place: Place) -> Found:
    place.rank.rename(place.root / "elsewhere")
    place.rank.symlink_to(place.root / "elsewhere")
    return [("symlink", "r0", None)]


def engine_is_a_symlink(place: Place) -> Found:
    place.engine.rename(place.root / "elsewhere")
    place.engine.symlink_to(place.root / "elsewhere")
    return [("symlink", "", None)]


def namespace_is_a_file(place: Place) -> Found:
    (place.top / ("0" * 32)).write_text("")
    return [("special", f"saria/{'0' * 32}", None)]


def other_user(place: Place) -> Found:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place.data(1), 12345, -1)
    return [("owner", "r0/" + data_name(1), None)]


def other_users_rank(place: Place) -> Found:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place.rank, 12345, -1)
    return [("owner", "r0", None)]


def namespace_of_another_version(place: Place) -> Found:
    shutil.rmtree(place.namespace)
    parts = {**PARTS, "format": fmt.FORMAT_VERSION + 1}
    LiveEngine([str(place.root)], parts=parts).close()
    return [("version", f"saria/{namespace_name(parts)}/e0", None)]


DROPPED = [
    flipped_payload, flipped_payload_of_an_open_segment, flipped_padding, swapped_records, lost_write, misplaced_write,
    torn_write, flipped_header, no_header, empty_file, cut_file, long_file, renamed_file, file_of_another_rank,
    other_format_version, unknown_group, size_of_another_group, huge_counts, flipped_index, no_index, no_journal,
    torn_journal, flipped_journal, endless_journal, orphan_journal, data_is_a_symlink, data_is_a_fifo, data_is_a_socket,
    damaged_parts, endless_parts, damaged_endurance, temporary_files,
]  # fmt: skip
KEPT = [
    data_is_a_directory, journal_is_a_fifo, open_mode, open_small_files, open_directories, foreign_files, no_lease,
    lease_is_a_symlink, damaged_generation, no_generation,
    generation_of_before, no_parts, rank_is_a_symlink,
    engine_is_a_symlink, namespace_is_a_file, other_user, other_users_rank, namespace_of_another_version,
]  # fmt: skip
