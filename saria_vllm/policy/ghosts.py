"""History of chunks whose bytes are gone, bounded, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """(evictions, reuses) by (group, key). One entry costs about 250 bytes with its key."""

    def __init__(self, entries_max: int) -> None:
        assert entries_max > 0
        self._entries_max = entries_max
        self._entries: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, group: int, key: bytes, evictions: int, reuses: int) -> None:
        """Keep the history of a chunk that no tier holds any more."""
        self._entries[group, key] = evictions | reuses << 8
        self._entries.move_to_end((group, key))
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)

    def recall(self, group: int, key: bytes) -> tuple[int, int]:
        """Take back (evictions, reuses) of a chunk that is stored again; (0, 0) for a stranger."""
        packed = self._entries.pop((group, key), 0)
        return packed & 0xFF, packed >> 8

    def clear(self) -> None:
        self._entries.clear()
