"""Block ids as token ids: equal ids are equal tokens, in any session, run and process with the same seed."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable

from saria_vllm.sim.trace import Request


class PromptMaker:
    """Prompts for a real model, scaled down without changing which prompts share which prefix.

    A trace block of `block_tokens` tokens becomes `scaled_tokens` tokens; what does not fill a block is scaled
    likewise, and its tokens belong to that one request.
    """

    def __init__(self, seed: int, vocab: tuple[int, int], block_tokens: int, scaled_tokens: int) -> None:
        low, high = vocab
        if not 0 <= low < high:
            raise ValueError(f"vocab {low}:{high} is not a range of token ids, low below high")
        if not 0 < scaled_tokens <= block_tokens:
            raise ValueError(f"{scaled_tokens} tokens for a block of {block_tokens}: expected 1 to {block_tokens}")
        self.seed = seed
        self.vocab = vocab
        self.block_tokens = block_tokens
        self.scaled_tokens = scaled_tokens
        self._block = functools.lru_cache(maxsize=65_536)(self._draw)

    def length(self, request: Request) -> int:
        """Tokens of the prompt that `prompt` makes."""
        return max(1, request.input_tokens * self.scaled_tokens // self.block_tokens)

    def prompt(self, request: Request, turn: int) -> list[int]:
        """Token ids of a request; `turn` names its unshared tail."""
        tokens: list[int] = []
        for block in request.blocks():
            tokens.extend(self._block(str(block), self.scaled_tokens))
        length = self.length(request)
        if len(tokens) < length:
            tokens.extend(self._block(f"{request.session}/{turn}", length - len(tokens)))
        return tokens[:length]

    def _draw(self, name: str, count: int) -> tuple[int, ...]:
        low, high = self.vocab
        data = hashlib.shake_128(f"{self.seed}:{name}".encode()).digest(4 * count)
        return tuple(low + word % (high - low) for word in struct.unpack(f"<{count}I", data))


def fitting_scale(requests: Iterable[Request], block_tokens: int, prompt_tokens_max: int) -> int:
    """Most tokens per trace block with which the longest of these prompts fits; at least 1."""
    longest = max((request.input_tokens for request in requests), default=1)
    return min(block_tokens, max(1, prompt_tokens_max * block_tokens // longest))
