"""Claiming an engine directory on drives that are full, read-only or failing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage import namespace as namespace_module
from saria_vllm.storage import reclaim
from saria_vllm.storage.namespace import (
    RESETS_MAX,
    EngineDirectory,
    Generation,
    namespace_name,
    pack_generation,
)
from saria_vllm.storage.reclaim import Claimed, claim_with_room

PARTS = {"model": "tiny"}
NAME = namespace_name(PARTS)
OLD, OLDER = namespace_name({"model": "old"}), namespace_name({"model": "older"})
FULL_BYTES = 1 << 20
"""What a drive here holds."""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    return (str(tmp_path / "x"), str(tmp_path / "y"))


@pytest.fixture(autouse=True)
def small_drives(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """No small file can be written under a path that holds `FULL_BYTES`."""
    write = namespace_module.write_durably

    def write_durably(directory_fd: int, name: str, text: str) -> None:
        at = os.readlink(f"/proc/self/fd/{directory_fd}")
        path = next(path for path in paths if at.startswith(path))
        if sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) >= FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write(directory_fd, name, text)

    monkeypatch.setattr(namespace_module, "write_durably", write_durably)


def claim(paths: tuple[str, ...]) -> Claimed:
    return claim_with_room(paths, NAME, PARTS, 0)


def leave(paths: tuple[str, ...], name: str = NAME, nbytes: int = 0, modified: float = 1000.0, resets: int = 0) -> Path:
    """An engine directory of an earlier process, with a segment on the first path."""
    engine = EngineDirectory.claim(paths, name, PARTS, 0)
    for _ in range(resets):
        engine.bump_generation()
    engine.release()
    segment = Path(engine.directories[0], "r0", "seg-0000000000000000.data")
    segment.parent.mkdir()
    segment.write_bytes(b"x" * nbytes)
    for file in ("r0/seg-0000000000000000.data", "lease", "generation"):
        os.utime(Path(engine.directories[0], file), (modified, modified))
    return segment


def foreign(path: str) -> None:
    Path(path).mkdir(exist_ok=True)
    Path(path, "foreign").write_bytes(b"x" * FULL_BYTES)


def test_the_oldest_of_others_goes_until_a_new_namespace_fits(paths: tuple[str, ...]) -> None:
    newer = leave(paths[:1], OLD, FULL_BYTES // 2, modified=3000.0)
    older = leave(paths[:1], OLDER, FULL_BYTES // 2, modified=2000.0)
    claimed = claim(paths)
    assert claimed.directory is not None and claimed.directory.paths == paths
    assert (claimed.left_out, claimed.removed) == ([], [str(older.parent.parent)])
    assert (older.exists(), newer.exists()) == (False, True)
    assert not os.path.exists(f"{paths[0]}/saria/{OLDER}")
    claimed.directory.release()


def test_our_own_that_was_reset_goes_first_and_no_other(paths: tuple[str, ...]) -> None:
    old = leave(paths[:1], OLD, FULL_BYTES // 2)
    own = leave(paths[:1], NAME, FULL_BYTES // 2, modified=3000.0, resets=1)
    claimed = claim(paths[:1])
    assert claimed.directory is not None and claimed.removed == [str(own.parent.parent)]
    assert (own.exists(), old.exists()) == (False, True)
    claimed.directory.release()


def test_our_own_on_a_full_drive_is_claimed_as_it_is(paths: tuple[str, ...]) -> None:
    old, own = leave(paths[:1], OLD, 1), leave(paths[:1], NAME, FULL_BYTES)
    claimed = claim(paths[:1])
    assert claimed.directory is not None and claimed.removed == [] and own.exists() and old.exists()
    claimed.directory.release()


def test_a_reset_on_a_full_drive_is_durable(paths: tuple[str, ...]) -> None:
    engine = EngineDirectory.claim(paths, NAME, PARTS, 0)
    foreign(paths[0])
    assert (engine.bump_generation(), engine.bump_generation()) == (2, 3)
    for directory in engine.directories:
        assert sorted(os.listdir(directory)) == ["generation", "lease"]
        assert Path(directory, "generation").read_text() == pack_generation(Generation(3, True))
    engine.release()
    os.unlink(f"{paths[0]}/foreign")
    after = EngineDirectory.claim(paths, NAME, PARTS, 0)
    assert after.generation == 3 + RESETS_MAX
    after.release()


def test_a_reset_whose_file_went_on_a_full_drive_is_not_durable(paths: tuple[str, ...]) -> None:
    engine = EngineDirectory.claim(paths, NAME, PARTS, 0)
    os.unlink(f"{engine.directories[0]}/generation")
    foreign(paths[0])
    with pytest.raises(StorageError, match=f"{engine.directories[0]}/generation"):
        engine.bump_generation()
    assert engine.generation == 2
    engine.release()


def test_a_leased_directory_stays_and_a_full_drive_is_left_out(paths: tuple[str, ...]) -> None:
    segment = leave(paths[:1], OLD, FULL_BYTES)
    living = EngineDirectory.claim(paths[:1], OLD, PARTS, 0)
    for asked, used in ((paths, paths[1:]), (paths[:1], None)):
        claimed = claim(asked)
        assert (claimed.directory.paths if claimed.directory else None) == used
        assert claimed.removed == [] and segment.exists()
        assert [problem.partition(": ")[2] for problem in claimed.left_out] == ["No space left on device"]
        assert claimed.left_out[0].startswith(f"{paths[0]}/saria/{NAME}")
        if claimed.directory is not None:
            claimed.directory.release()
    living.release()
    claimed = claim(paths)
    assert claimed.directory is not None and claimed.directory.paths == paths
    claimed.directory.release()


def test_a_full_drive_is_claimed_once_there_is_room(paths: tuple[str, ...]) -> None:
    segment = leave(paths[:1], NAME)
    generation = segment.parent.parent / "generation"
    generation.write_bytes(b"damaged")
    foreign(paths[0])
    for _ in range(2):
        assert claim(paths[:1]).directory is None
        assert segment.exists() and generation.exists()
    os.unlink(f"{paths[0]}/foreign")
    claimed = claim(paths[:1])
    assert claimed.directory is not None and claimed.left_out == []
    claimed.directory.release()


@pytest.mark.parametrize("damage", [b"damaged", pack_generation(Generation(7, True)).encode()])
def test_a_drive_that_cannot_be_written_costs_the_others_nothing(
    paths: tuple[str, ...], damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start tries it anew: the generation of what the good drive holds must not move."""
    bad, good = paths
    leave((bad, good), NAME)
    Path(good, "saria", NAME, "e0", "generation").write_text(pack_generation(Generation(8, False)))
    Path(bad, "saria", NAME, "e0", "generation").write_bytes(damage)
    foreign(bad)
    monkeypatch.setattr(reclaim, "_remove", lambda other: False)
    for asked in ((bad, good), (good, bad)):
        claimed = claim(asked)
        assert claimed.directory is not None
        assert (claimed.directory.paths, claimed.directory.generation) == ((good,), 8)
        claimed.directory.release()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENODEV, errno.ESTALE])
def test_a_failing_drive_is_left_out(paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    makedirs = os.makedirs

    def failing(path: str, *args: Any, **more: Any) -> None:
        if path == paths[0]:
            raise OSError(code, os.strerror(code), path)
        makedirs(path, *args, **more)

    monkeypatch.setattr(os, "makedirs", failing)
    claimed = claim(paths)
    assert claimed.directory is not None and claimed.directory.paths == paths[1:]
    assert claimed.left_out == [f"{paths[0]}: {os.strerror(code)}"]
    claimed.directory.release()
    assert claim(paths[:1]) == (None, [f"{paths[0]}: {os.strerror(code)}"], [])


def test_a_drive_whose_directories_cannot_be_listed_is_left_out(
    paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python says the number of the descriptor then, in the place of a name."""
    leave(paths, NAME)
    engine = f"{paths[0]}/saria/{NAME}/e0"
    os.unlink(f"{engine}/generation")
    listdir = os.listdir

    def failing(directory: int) -> list[str]:
        if os.readlink(f"/proc/self/fd/{directory}") == engine:
            raise OSError(errno.EIO, os.strerror(errno.EIO), directory)
        return listdir(directory)

    monkeypatch.setattr(os, "listdir", failing)
    claimed = claim(paths)
    assert claimed.directory is not None and claimed.directory.paths == paths[1:]
    assert claimed.left_out == [f"{engine}: {os.strerror(errno.EIO)}"]
    claimed.directory.release()


def a_file(path: Path) -> None:
    path.mkdir()
    (path / "saria").write_text("")


def a_link(path: Path) -> None:
    path.mkdir()
    (path / "saria").symlink_to(path.parent)


def no_directory(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("misuse", [a_file, a_link, no_directory])
def test_what_is_configured_wrongly_is_an_error_before_anything_goes(
    paths: tuple[str, ...], misuse: Callable[[Path], None]
) -> None:
    old = leave(paths[:1], OLD, FULL_BYTES)
    misuse(Path(paths[1]))
    with pytest.raises(StorageError):
        claim(paths)
    assert old.exists()
