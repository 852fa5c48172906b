"""How recovery reads segments: in what order, ahead of the parser, in pieces."""

from __future__ import annotations

import errno
import os

import pytest

from saria_vllm.storage import format as fmt
from saria_vllm.storage import recovery
from saria_vllm.types import Extent
from store_bench import STORE_ID, Bench, fill, is_right, write


def test_records_are_found_in_order_whatever_order_they_were_committed_in(bench: Bench) -> None:
    store, _ = bench.reopen()
    for segment, records in ((0, (2, 0, 3, 1)), (2, (1, 0))):  # The second one is left open.
        for record in records:
            write(store, 0, Extent(0, segment, record), b"%d-%d" % (segment, record))
    _, found = bench.reopen()
    assert [chunk.extent for chunk in found] == [Extent(0, s, r) for s, end in ((0, 4), (2, 2)) for r in range(end)]
    again, found = bench.reopen()
    assert [chunk.key for chunk in found] == [b"0-0", b"0-1", b"0-2", b"0-3", b"2-0", b"2-1"]
    assert all(is_right(again, 0, chunk.extent, chunk.key) for chunk in found)


def test_more_segments_than_are_asked_for_ahead_are_all_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "AHEAD", 2)
    store, _ = bench.reopen()
    keys = [key for segment in range(7) for key in fill(store, segment)]
    asked = []
    real = os.posix_fadvise

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), offset, length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    assert [chunk.key for chunk in bench.reopen()[1]] == keys
    header = fmt.Header(STORE_ID, 0, 0, 0, 4096, 4)
    parts = ((0, fmt.HEADER_BYTES), (fmt.index_offset(header), fmt.index_bytes(4)))
    assert asked == [(recovery.data_name(segment), *part) for segment in reversed(range(7)) for part in parts]


def test_a_hint_that_is_refused_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = bench.reopen()
    keys = fill(store)
    real = os.posix_fadvise

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            raise OSError(errno.EIO, "no hints")
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    assert [chunk.key for chunk in bench.reopen()[1]] == keys


def test_an_index_that_comes_in_pieces_is_read_whole_and_one_that_ends_early_is_not_believed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = bench.reopen()
    keys = fill(store)
    store.close()
    real = os.preadv
    again = bench.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:100]], offset))
        assert again.recover().key_list() == keys
    again = bench.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, views, offset: 0)
        assert again.recover().key_list() == []
