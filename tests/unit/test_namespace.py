"""Namespaces, engine directories, leases, generations, and making room."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saria_vllm.errors import DriveError, StorageError
from saria_vllm.storage import directories
from saria_vllm.storage.namespace import (
    RESETS_MAX,
    EngineDirectory,
    Generation,
    last_claimed,
    namespace_name,
    pack_generation,
    parse_generation,
    store_id,
)
from saria_vllm.storage.reclaim import share_capacity

PARTS = {"model": "tiny", "ranks": 2, "layers": ["a", "b"]}
NAME = namespace_name(PARTS)
OTHER = namespace_name({"model": "other"})

HOLD = """
import sys, time
from saria_vllm.storage.namespace import EngineDirectory
engine = EngineDirectory.claim(sys.argv[3:], sys.argv[1], {}, 0)
for _ in range(int(sys.argv[2])):
    engine.bump_generation()
print(engine.index, engine.generation, flush=True)
time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    return (str(tmp_path / "x"), str(tmp_path / "y"))


class Holder:
    """An engine in another process, with a lease."""

    def __init__(self, paths: tuple[str, ...], bumps: int = 0) -> None:
        command = [sys.executable, "-c", HOLD, NAME, str(bumps), *paths]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.index, self.generation = map(int, self.process.stdout.readline().split())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def claim(paths: tuple[str, ...], namespace: str = NAME, preferred: int = 0) -> EngineDirectory:
    return EngineDirectory.claim(paths, namespace, PARTS, preferred)


def generation_after_restart(paths: tuple[str, ...]) -> int:
    engine = claim(paths)
    engine.release()
    return engine.generation


def test_names_are_fingerprints() -> None:
    assert namespace_name(dict(reversed(PARTS.items()))) == NAME
    assert len(NAME) == 32
    assert directories.NAMESPACE_NAME.fullmatch(NAME)
    names = [namespace_name(parts) for parts in ({}, PARTS, {**PARTS, "ranks": "2"}, {**PARTS, "layers": ["ab"]})]
    ids = [store_id(NAME, 0, 0), store_id(NAME, 0, 1), store_id(NAME, 1, 0), store_id(OTHER, 0, 0)]
    assert len({*names, *ids}) == 8
    assert all(len(one) == 16 for one in ids)


def test_claim_makes_private_directories_on_every_path(paths: tuple[str, ...]) -> None:
    old = os.umask(0)
    try:
        engine = claim(paths)
    finally:
        os.umask(old)
    assert engine.directories == tuple(f"{path}/saria/{NAME}/e0" for path in paths)
    assert (engine.index, engine.generation) == (0, 1)
    for path in paths:
        for root, folders, files in os.walk(os.path.join(path, "saria")):
            assert stat.S_IMODE(os.stat(root).st_mode) == 0o700
            assert {stat.S_IMODE(os.stat(os.path.join(root, name)).st_mode) for name in files} <= {0o600}
            assert sorted(files) in ([], ["namespace.json"], ["generation", "lease"]), (root, folders)
        assert '"model": "tiny"' in Path(path, "saria", NAME, "namespace.json").read_text()
    engine.release()
    engine.release()


def test_a_live_engine_is_skipped_and_a_dead_one_followed(paths: tuple[str, ...]) -> None:
    first, second = claim(paths), claim(paths)
    assert (first.index, second.index, claim_index(paths, 5)) == (0, 1, 5)
    first.release()
    again = claim(paths)
    assert again.index == 0
    again.release()
    second.release()


def claim_index(paths: tuple[str, ...], preferred: int) -> int:
    engine = claim(paths, preferred=preferred)
    engine.release()
    return engine.index


def test_a_lease_on_one_path_is_enough_to_be_skipped(paths: tuple[str, ...]) -> None:
    first = claim(paths[1:])
    assert claim_index(paths, 0) == 1
    first.release()
    assert claim_index(paths, 0) == 0


def test_leases_die_with_their_process(paths: tuple[str, ...]) -> None:
    holder = Holder(paths)
    assert (holder.index, claim_index(paths, 0)) == (0, 1)
    holder.kill()
    assert claim_index(paths, 0) == 0


def test_claims_leave_no_descriptors(paths: tuple[str, ...], tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first = claim(paths)
    claim(paths).release()
    first.bump_generation()
    share_capacity(paths, first, 0)
    first.release()
    (tmp_path / "x" / "saria" / OTHER).symlink_to("/tmp")
    with pytest.raises(StorageError):
        claim(paths, OTHER)
    assert len(os.listdir("/proc/self/fd")) == before


def test_generations_of_resets_are_for_one_process(paths: tuple[str, ...]) -> None:
    engine = claim(paths)
    assert (engine.bump_generation(), engine.bump_generation(), engine.generation) == (2, 3, 3)
    engine.release()
    assert generation_after_restart(paths) == 3 + RESETS_MAX
    assert generation_after_restart(paths) == 3 + RESETS_MAX


def test_generation_is_durable_against_kill(paths: tuple[str, ...]) -> None:
    holder = Holder(paths, bumps=3)
    assert holder.generation == 4
    holder.kill()
    assert generation_after_restart(paths) == 4 + RESETS_MAX


def test_the_highest_generation_over_the_paths_counts(paths: tuple[str, ...]) -> None:
    engine = claim(paths[:1])
    engine.bump_generation()
    engine.release()
    assert generation_after_restart(paths) == 2 + RESETS_MAX
    assert generation_after_restart(paths[1:]) == 2 + RESETS_MAX


def test_a_half_done_bump_begins_another(paths: tuple[str, ...]) -> None:
    claim(paths).release()
    Path(paths[1], "saria", NAME, "e0", "generation").write_text(pack_generation(Generation(2, True)))
    assert generation_after_restart(paths) == 2 + RESETS_MAX


BAD_CRC = b'{"generation": 9, "process_only": false, "crc": 1}\n'


@pytest.mark.parametrize("damage", [b"", b"{}", b"3\n", BAD_CRC, b"[" * 60000])
def test_a_damaged_generation_begins_a_far_one(paths: tuple[str, ...], damage: bytes) -> None:
    claim(paths).release()
    Path(paths[0], "saria", NAME, "e0", "generation").write_bytes(damage)
    after = generation_after_restart(paths)
    assert after > 1000
    assert generation_after_restart(paths) == after


def test_a_missing_generation_beside_records_begins_a_far_one(paths: tuple[str, ...]) -> None:
    claim(paths).release()
    engine = Path(paths[0], "saria", NAME, "e0")
    (engine / "r0").mkdir()
    (engine / "generation").unlink()
    assert generation_after_restart(paths) > 1000


@given(st.binary(max_size=100))
def test_noise_is_no_generation(noise: bytes) -> None:
    assert parse_generation(noise) is None


@given(st.integers(1, 2**63), st.booleans())
def test_generation_round_trip(number: int, process_only: bool) -> None:
    packed = pack_generation(Generation(number, process_only)).encode()
    assert parse_generation(packed) == (number, process_only)
    assert parse_generation(packed.replace(b"false", b"true ")) in (None, (number, process_only))


def test_a_bump_that_is_not_durable_says_so_and_holds_here(paths: tuple[str, ...]) -> None:
    engine = claim(paths)
    os.rename(paths[1], paths[1] + "-gone")
    with pytest.raises(StorageError, match=f"{paths[1]}"):
        engine.bump_generation()
    assert engine.generation == 2
    engine.release()
    assert generation_after_restart(paths[:1]) == 2 + RESETS_MAX


def test_records_of_a_reset_that_was_not_durable_are_not_used_after_a_restart(paths: tuple[str, ...]) -> None:
    """The reset before it was: it is what the files tell."""
    engine = claim(paths)
    assert engine.bump_generation() == 2
    for path in paths:
        os.rename(path, path + "-gone")
    with pytest.raises(StorageError):
        engine.bump_generation()
    of_records = engine.generation
    for path in paths:
        os.rename(path + "-gone", path)
    engine.release()
    assert generation_after_restart(paths) > of_records


@pytest.mark.parametrize("link", ["saria", f"saria/{NAME}", f"saria/{NAME}/e0"])
def test_symlinks_below_a_path_are_refused(paths: tuple[str, ...], tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    at = Path(paths[0], link)
    at.parent.mkdir(parents=True)
    at.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="symlink"):
        claim(paths)
    assert list(elsewhere.iterdir()) == []


def test_a_symlinked_lease_and_generation_are_not_followed(paths: tuple[str, ...], tmp_path: Path) -> None:
    claim(paths).release()
    engine = Path(paths[0], "saria", NAME, "e0")
    target = tmp_path / "target"
    target.write_text(pack_generation(Generation(1, False)))
    (engine / "generation").unlink()
    (engine / "generation").symlink_to(target)
    assert generation_after_restart(paths) > 1000
    assert target.read_text() == pack_generation(Generation(1, False))
    (engine / "lease").unlink()
    (engine / "lease").symlink_to(target)
    with pytest.raises(StorageError):
        claim(paths)


def test_a_lease_and_a_generation_that_are_no_files_are_not_waited_for(paths: tuple[str, ...]) -> None:
    claim(paths).release()
    engine = Path(paths[0], "saria", NAME, "e0")
    (engine / "generation").unlink()
    os.mkfifo(engine / "generation")
    assert generation_after_restart(paths) > 1000
    (engine / "lease").unlink()
    os.mkfifo(engine / "lease")
    with pytest.raises(StorageError, match="not a regular file"):
        claim(paths)


@pytest.mark.parametrize("name", ["lease", "generation", "generation.new"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("target", path)])
def test_what_is_in_the_place_of_our_files_is_named(
    paths: tuple[str, ...], name: str, make: Callable[[Path], None]
) -> None:
    claim(paths).release()
    file = Path(paths[0], "saria", NAME, "e0", name)
    file.with_name("generation").write_bytes(b"damaged")
    file.unlink(missing_ok=True)
    make(file)
    if name != "lease" and make is not os.mkdir:
        claim(paths).release()  # It is replaced.
        return
    with pytest.raises(StorageError) as caught:
        claim(paths)
    assert str(caught.value).startswith(f"ssd_paths: {paths[0]!r}: {file}: not a regular file; accepted: a directory")
    assert not isinstance(caught.value, DriveError)


@pytest.mark.parametrize("name", ["saria", f"saria/{NAME}", f"saria/{NAME}/e0"])
@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/"), os.mkfifo])
def test_what_is_in_the_place_of_our_directories_is_named(
    paths: tuple[str, ...], name: str, make: Callable[[Path], None]
) -> None:
    at = Path(paths[0], name)
    at.parent.mkdir(parents=True)
    make(at)
    with pytest.raises(StorageError) as caught:
        claim(paths)
    assert str(caught.value).startswith(f"ssd_paths: {paths[0]!r}: {at}: a symlink or no directory")
    assert "; accepted: a directory that this user can write in" in str(caught.value)


def test_paths_that_cannot_be_used_are_storage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        claim((str(tmp_path / "file"),))


def test_loose_permissions_are_tightened(paths: tuple[str, ...]) -> None:
    claim(paths).release()
    os.chmod(f"{paths[0]}/saria", 0o777)
    claim(paths).release()
    assert stat.S_IMODE(os.stat(f"{paths[0]}/saria").st_mode) == 0o700


# What was used last


def used(path: str, parts: dict[str, Any], claimed: float) -> Path:
    """A namespace of which an engine took a directory at that time."""
    claim((path,), namespace_name(parts)).release()
    place = Path(path, "saria", namespace_name(parts))
    (place / "namespace.json").write_text(json.dumps(parts))
    os.utime(place / "e0" / "lease", (claimed, claimed))
    return place


def test_the_namespace_that_was_claimed_last_on_any_path_is_known(paths: tuple[str, ...]) -> None:
    assert last_claimed(paths) is None
    parts = [{"model": f"m{number}"} for number in range(6)]
    names = [namespace_name(of) for of in parts]
    places = [used(paths[number % 2], of, 100.0 * (number + 1)) for number, of in enumerate(parts)]
    assert last_claimed(paths) == (names[5], parts[5])
    assert last_claimed(paths[:1]) == (names[4], parts[4])
    used(paths[1], parts[0], 1e6)
    assert last_claimed(paths) == (names[0], parts[0]), "its older lease on the other path does not count"
    shutil.rmtree(places[5].parent / names[0])
    (places[5] / "e0" / "lease").unlink()
    assert last_claimed(paths) == (names[4], parts[4])
    places[4].rename(places[4].with_name("elsewhere"))
    places[4].symlink_to("elsewhere")
    assert last_claimed(paths) == (names[3], parts[3])
    for damage, left in (("[1]", 2), ("[" * 60_000, 1), ("{", 0)):
        (places[left + 1] / "namespace.json").write_text(damage)
        assert last_claimed(paths) == (names[left], parts[left])
    shutil.rmtree(Path(paths[0], "saria"))
    Path(paths[0], "saria").symlink_to(places[5].parent)
    assert last_claimed(paths) is None


def test_the_engine_that_was_claimed_last_counts_and_a_namespace_without_any_is_the_oldest(
    paths: tuple[str, ...],
) -> None:
    place = used(paths[0], PARTS, 1.0)
    claim(paths[:1], preferred=1).release()
    used(paths[0], {"model": "other"}, 100.0)
    assert last_claimed(paths) == (NAME, PARTS), "its e1 just now"
    for engine in ("e0", "e1"):
        shutil.rmtree(place / engine)
    assert last_claimed(paths) == (OTHER, {"model": "other"})
    shutil.rmtree(place.with_name(OTHER))
    assert last_claimed(paths) == (NAME, PARTS)


# Making room


@pytest.fixture
def ours(paths: tuple[str, ...]) -> Iterator[EngineDirectory]:
    engine = claim(paths)
    yield engine
    engine.release()


def fill(path: str, namespace: str, engine: str, nbytes: int, modified: float) -> Path:
    directory = Path(path, "saria", namespace, engine)
    (directory / "r0").mkdir(parents=True)
    file = directory / "r0" / "seg-0000000000000000.data"
    file.write_bytes(b"x" * nbytes)
    os.utime(file, (modified, modified))
    return directory


def test_nothing_goes_while_there_is_room(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    other = fill(paths[0], OTHER, "e0", 1 << 20, 1000.0)
    left, removed = share_capacity(paths, ours, 8 << 20)
    assert (removed, other.exists()) == ([], True)
    assert 6.5 * 2**20 < left <= 7 * 2**20


def test_the_oldest_goes_first_until_it_fits(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    old = fill(paths[1], OTHER, "e3", 1 << 20, 1000.0)
    new = fill(paths[0], OTHER, "e0", 1 << 20, 3000.0)
    sibling = fill(paths[0], NAME, "e7", 1 << 20, 2000.0)
    left, removed = share_capacity(paths, ours, int(2.2 * 2**20))
    assert removed == [str(old), str(sibling)]
    assert (old.exists(), old.parent.exists(), sibling.exists(), new.exists()) == (False, False, False, True)
    assert left < 1.5 * 2**20
    assert Path(ours.directories[0]).exists()


def test_leased_and_own_directories_stay(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    with_lease = claim(paths, OTHER)
    fill(paths[0], OTHER, "e0", 1 << 20, 1000.0)
    fill(paths[0], NAME, "e0", 1 << 20, 1000.0)
    left, removed = share_capacity(paths, ours, 2**20)
    assert left == 0
    assert removed == []
    assert Path(with_lease.directories[0], "r0", "seg-0000000000000000.data").exists()
    with_lease.release()
    left, removed = share_capacity(paths, ours, 2**20)
    assert set(removed) == set(with_lease.directories)


def test_foreign_names_and_symlinks_survive(paths: tuple[str, ...], ours: EngineDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "seg-0000000000000000.data").write_bytes(b"precious")
    directory = fill(paths[0], OTHER, "e0", 1 << 20, 1000.0)
    (directory / "r0" / "notes").write_bytes(b"n")
    (directory / "r1").symlink_to(outside)
    fill(paths[0], OTHER, "backup", 1 << 20, 1000.0)
    fill(paths[0], "not-ours", "e0", 1 << 20, 1000.0)
    (Path(paths[0]) / "saria" / ("0" * 32)).symlink_to(outside)
    share_capacity(paths, ours, 0)
    assert (outside / "seg-0000000000000000.data").read_bytes() == b"precious"
    assert (directory / "r0" / "notes").exists()
    assert Path(paths[0], "saria", OTHER, "backup", "r0", "seg-0000000000000000.data").exists()
    assert Path(paths[0], "saria", "not-ours", "e0", "r0", "seg-0000000000000000.data").exists()


def test_a_tree_without_a_bottom_does_not_stop_reclaiming(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    old = fill(paths[0], OTHER, "e0", 1 << 20, 1000.0)
    deep = [f"{paths[0]}/saria" + "/d" * depth for depth in range(1, 1500)]
    for path in deep:
        os.mkdir(path)
    try:
        left, removed = share_capacity(paths, ours, 2**20)
    finally:  # or what clears up after the tests fails as well
        for path in reversed(deep):
            os.rmdir(path)
    assert (removed, old.exists()) == ([str(old)], False)
    assert left > 2**19


def test_claims_while_others_reclaim(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    for _ in range(20):
        engine = claim(paths, OTHER)
        share_capacity(paths, ours, 0)
        assert all(Path(directory, "lease").exists() for directory in engine.directories)
        engine.release()
        share_capacity(paths, ours, 0)
        assert not Path(paths[0], "saria", OTHER).exists()


def test_a_missing_path_counts_as_empty(paths: tuple[str, ...], ours: EngineDirectory) -> None:
    assert share_capacity((*paths, "/nonexistent/path"), ours, 2**20)[1] == []


def test_a_full_cache_of_an_old_configuration_leaves_half_of_the_capacity(
    paths: tuple[str, ...], ours: EngineDirectory
) -> None:
    """Just under the cap nothing is over it, but a new configuration could not write a byte."""
    old = fill(paths[0], OTHER, "e0", 1 << 20, 1000.0)
    left, removed = share_capacity(paths, ours, int(1.1 * 2**20))
    assert removed == [str(old)]
    assert left > 2**20
