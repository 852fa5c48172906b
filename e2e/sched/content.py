"""What KV a request's tokens make, position by position. A mark stands for the bytes of one position: it depends on all
tokens before it, the adapter, the salt and the images, and is worked out here without vLLM's hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

POISON = -1
"""Bytes of nobody: blocks that a load is to fill."""

VOCABULARY = 500


class Content(NamedTuple):
    """What a slot or an SSD record holds."""

    marks: tuple[int, ...]
    generation: int


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def sampled(mark: int) -> int:
    """The token that the model samples after a position: a function of the whole prefix, so a wrong prefix shows."""
    return 3 + digest("sampled", mark) % VOCABULARY


class Truth:
    """Tokens and marks of one request as they must be, extended as far as they are asked for."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.marks: list[int] = []
        adapter = request.lora_request
        self._root = (adapter and (adapter.lora_name, adapter.lora_path), request.cache_salt)

    def token(self, position: int) -> int:
        self.extend(position + 1)
        return self.tokens[position]

    def extend(self, end: int) -> None:
        known = self.request._all_token_ids
        while len(self.tokens) < end:
            position = len(self.tokens)
            token = known[position] if position < len(known) else sampled(self.marks[-1])
            self.tokens.append(token)
            self.marks.append(self.mark_after(position, token))

    def mark_after(self, position: int, token: int, before: int | None = None) -> int:
        """The mark of `token` at `position`; `before` is the mark that precedes it, the true one by default."""
        if before is None:
            before = self.marks[position - 1] if position else digest(self._root)
        image = next(
            (
                feature.identifier
                for feature in self.request.mm_features
                if 0 <= position - feature.mm_position.offset < feature.mm_position.length
            ),
            None,
        )
        return digest(before, token, image)

    def slice(self, first: int, end: int) -> Sequence[int]:
        self.extend(end)
        return self.marks[first:end]

    def last_marks(self, chunk_tokens: int, tokens: int) -> list[int]:
        """The last mark of every full chunk of the first `tokens` tokens: it names the chunk and all before it."""
        self.extend(tokens)
        return self.marks[chunk_tokens - 1 : tokens : chunk_tokens]
