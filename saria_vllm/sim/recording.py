"""Our own trace of a running server: what the connector appends to `trace_record`, and its reader.

JSON lines. The first is a header:

  {"saria_trace": 1, "chunk_tokens": 64, "started": 1767225600.0}      unix seconds

Each further line is one finished request, in order of its end:

  {"t": 12.5, "in": 100000, "out": 211, "keep": 1540, "of": 7, "add": "kY3w..."}

`t` is seconds from `started` to its arrival, `in` and `out` are tokens. Its full chunks are the first `keep` of
request line `of` (counted from 0 after the header, bad lines too; null when `keep` is 0), then those in `add`:
8 bytes each, in base64, a hash of the chunk's key under a salt that is not in the file. So an agent's turn costs a
line of ~80 bytes and ~11 bytes per new chunk, and nothing in the file can be traced to tokens. A chunk whose
request is no longer remembered is written again, with the same hash. The last line may be {"full": true}: the size
limit was reached.

A server that is started again appends a header and goes on: lines count from 0 again, times stay on one clock, and
since the salt is new, requests share nothing with those before.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence

import msgspec

from saria_vllm.errors import TraceError
from saria_vllm.sim.trace import (
    TIME_MAX_S,
    TOKENS_MAX,
    Request,
    Run,
    Session,
    append_runs,
    check_limits,
    check_once,
    decoded,
    id_runs,
)

VERSION = 1
HASH_BYTES = 8
SALT_BYTES_MIN, SALT_BYTES_MAX = 16, 64
FULL = b'{"full":true}\n'

_CHAIN_BITS = 32

Lines = Iterable[tuple[int, bytes]]


class _Line(msgspec.Struct, omit_defaults=True):
    """Any line of a recording: a header, a request, or the last."""

    saria_trace: int = 0
    chunk_tokens: int = 0
    started: float = 0.0
    full: bool = False
    t: float = -1.0
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    keep: int = 0
    of: int | None = None
    add: bytes = b""


_LINE = msgspec.json.Decoder(_Line)


class _Chain:
    """Keys that follow each other and that one remembered request has all of."""

    __slots__ = ("end", "keys", "line")

    def __init__(self, line: int, keys: list[bytes], end: int) -> None:
        self.line = line
        self.keys = keys
        self.end = end
        """Chunks of request `line`, up to the last of `keys`."""


class Recorder:
    """Turns finished requests into lines; does no I/O and holds no more than its limits.

    A line stands on those before: after a line could not be written, write no more of this recorder's.
    It remembers the chunks of recent requests, longest unused forgotten first, to find what a prompt shares with
    one of them; what was forgotten costs bytes, never truth.
    """

    def __init__(
        self, salt: bytes, chunk_tokens: int, *, bytes_max: int, requests_max: int = 1024, keys_max: int = 1 << 18
    ) -> None:
        """`salt` is secret and random, 16 to 64 bytes; `bytes_max` is for all lines together, the header too."""
        if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
            raise ValueError(f"salt has {len(salt)} bytes, not {SALT_BYTES_MIN} to {SALT_BYTES_MAX}")
        self.chunk_tokens = chunk_tokens
        self.bytes_max = bytes_max
        self.bytes_written = 0
        self.full = False
        self._salt = salt
        self._requests_max = requests_max
        self._keys_max = keys_max
        self._lines = 0
        self._chains: dict[_Chain, None] = {}
        """Longest unused first."""
        self._owner: dict[bytes, _Chain] = {}

    def header(self, started: float, *, appending: bool = False) -> bytes:
        """The first line; `started` is in unix seconds.

        With `appending` it begins with a line break, so that it stands alone after a line that a crash cut short.
        """
        header = {"saria_trace": VERSION, "chunk_tokens": self.chunk_tokens, "started": started}
        return self._fit(b"\n" * appending + msgspec.json.encode(header))

    def record(self, time_s: float, keys: Sequence[bytes], input_tokens: int, output_tokens: int) -> bytes:
        """The line of a finished request that arrived `time_s` seconds after the start; empty once full.

        `keys` are its chunk keys in order, each naming the whole prefix up to it; those past the prompt are left out.
        """
        if self.full:
            return b""
        keys = keys[: input_tokens // self.chunk_tokens]
        keep, chain = self._shared(keys)
        added = list(keys[keep:])
        line = {
            "t": round(max(0.0, time_s), 3),
            "in": input_tokens,
            "out": output_tokens,
            "keep": keep,
            "of": chain.line if chain else None,
            "add": b"".join(hashlib.blake2b(key, key=self._salt, digest_size=HASH_BYTES).digest() for key in added),
        }
        data = self._fit(msgspec.json.encode(line))
        if not self.full:
            self._remember(chain, keep, added)
        return data

    def _fit(self, line: bytes) -> bytes:
        line += b"\n"
        if self.bytes_written + len(line) + len(FULL) > self.bytes_max:
            self.full = True
            self._chains.clear()
            self._owner.clear()
            line = FULL
        self.bytes_written += len(line)
        return line

    def _shared(self, keys: Sequence[bytes]) -> tuple[int, _Chain | None]:
        for place in range(len(keys) - 1, -1, -1):
            chain = self._owner.get(keys[place])
            if chain:
                return place + 1, chain
        return 0, None

    def _remember(self, chain: _Chain | None, keep: int, added: list[bytes]) -> None:
        line = self._lines
        self._lines += 1
        if chain:
            self._chains[chain] = self._chains.pop(chain)
        if not added:
            return
        if chain and chain.end == keep:
            chain.line, chain.end = line, keep + len(added)
            chain.keys += added
        else:
            chain = _Chain(line, added, keep + len(added))
            self._chains[chain] = None
        self._owner.update(dict.fromkeys(added, chain))
        while len(self._chains) > self._requests_max or len(self._owner) > self._keys_max:
            oldest = next(iter(self._chains))
            del self._chains[oldest]
            for key in oldest.keys:
                self._owner.pop(key, None)


class _Section:
    """Requests between one header and the next."""

    def __init__(self, chunk_tokens: int, offset_s: float, chains: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.offset_s = offset_s
        self.chains = chains
        """Chains of ids given out so far, in earlier sections too."""
        self._requests: list[tuple[Run, ...] | None] = []
        self._ids: dict[int, int] = {}
        self._tails: dict[int, int] = {}
        """Next free id of each chain, by chain."""

    def bad_line(self) -> None:
        self._requests.append(None)

    def request(self, raw: _Line, where: str) -> Session:
        number = len(self._requests)
        if raw.t < 0 or raw.input_tokens <= 0 or raw.output_tokens < 0 or len(raw.add) % HASH_BYTES:
            found = f"t {raw.t:g}, in {raw.input_tokens}, out {raw.output_tokens}, add of {len(raw.add)} bytes"
            message = f"expected t and out of at least 0, in above 0, add of {HASH_BYTES} bytes a chunk"
            raise TraceError(f"{where}: {found}; {message}")
        time_s = self.offset_s + raw.t
        check_limits(time_s, raw.input_tokens, raw.output_tokens, where)
        before = self._before(raw.of, where)
        had = sum(count for _, count in before)
        if not 0 <= raw.keep <= had:
            raise TraceError(f"{where}: keep is {raw.keep}; expected 0 to {had}, the chunks of request {raw.of}")
        chunks, full = raw.keep + len(raw.add) // HASH_BYTES, raw.input_tokens // self.chunk_tokens
        if chunks > full:
            raise TraceError(f"{where}: {chunks} chunks for {raw.input_tokens} tokens; expected at most {full}")
        runs = append_runs(before, raw.keep, ())
        runs = append_runs(runs, raw.keep, self._new_runs(runs, raw.add))
        check_once(runs, where)
        self._requests.append(runs)
        name = f"request {number}"
        request = Request(name, 0, time_s, raw.input_tokens, raw.output_tokens, "unknown", runs)
        return Session(name, self.chunk_tokens, 0, 0, "", (request,))

    def _before(self, of: int | None, where: str) -> tuple[Run, ...]:
        if of is None:
            return ()
        if not 0 <= of < len(self._requests):
            raise TraceError(f"{where}: of is {of}; expected a request line before this one, of {len(self._requests)}")
        before = self._requests[of]
        if before is None:
            raise TraceError(f"{where}: of is {of}, a malformed line; expected a good one")
        return before

    def _new_runs(self, kept: tuple[Run, ...], add: bytes) -> list[Run]:
        """Runs of added chunks: known hashes have their ids, new ones continue the chain they follow."""
        added: list[int] = []
        last = kept[-1][0] + kept[-1][1] - 1 if kept else -1
        for hashed in struct.unpack(f"<{len(add) // HASH_BYTES}Q", add):
            each = self._ids.get(hashed)
            if each is None:
                each = self._ids[hashed] = self._fresh_id(last)
            added.append(each)
            last = each
        return id_runs(added)

    def _fresh_id(self, last: int) -> int:
        """The id after `last` if no chunk has it, so that a prompt is few runs; else the first of a new chain."""
        chain = last >> _CHAIN_BITS
        if self._tails.get(chain) == last + 1:
            self._tails[chain] = last + 2
            return last + 1
        self.chains += 1
        first = self.chains << _CHAIN_BITS
        self._tails[self.chains] = first + 1
        return first


def sessions(lines: Lines, name: str, meet: Callable[[TraceError], None]) -> list[Session]:
    """Recorded requests in file order, each a session of its own; times count from the first header's start, or from
    the earliest request where a clock that was set back began another before it.

    `meet` is told of each malformed line, and raises it or counts it.

    Raises:
        TraceError: a header cannot be used. It is never skipped: the lines after it would be misread.
    """
    found: list[Session] = []
    section: _Section | None = None
    first_started = 0.0
    for number, line in lines:
        where = f"{name}, line {number}"
        try:
            raw = decoded(_LINE, line, where, "one request")
        except TraceError as problem:
            if section is None or b"saria_trace" in line:
                raise
            section.bad_line()
            meet(problem)
            continue
        if raw.saria_trace or section is None:
            first_started = first_started if section else raw.started
            section = _next_section(section, raw, raw.started - first_started, where)
        elif not raw.full:
            try:
                found.append(section.request(raw, where))
            except TraceError as error:
                section.bad_line()
                meet(error)
    early_s = min((session.requests[0].time_s for session in found), default=0.0)
    return [_later(session, -early_s) for session in found] if early_s < 0 else found


def _later(session: Session, by_s: float) -> Session:
    return session._replace(
        requests=tuple(request._replace(time_s=request.time_s + by_s) for request in session.requests)
    )


def _next_section(before: _Section | None, raw: _Line, offset_s: float, where: str) -> _Section:
    if raw.saria_trace != VERSION or not 0 < raw.chunk_tokens <= TOKENS_MAX:
        found = f"saria_trace {raw.saria_trace}, chunk_tokens {raw.chunk_tokens}"
        expected = f"version {VERSION} and chunk_tokens above 0, at most {TOKENS_MAX}"
        raise TraceError(f"{where}: {found}; expected {expected}")
    if abs(raw.started) > TIME_MAX_S:
        raise TraceError(f"{where}: started {raw.started:g}; expected unix seconds, at most {TIME_MAX_S:g}")
    if before and before.chunk_tokens != raw.chunk_tokens:
        raise TraceError(
            f"{where}: chunk_tokens {raw.chunk_tokens}; expected {before.chunk_tokens}, as in the header before"
        )
    return _Section(raw.chunk_tokens, offset_s, before.chains if before else 0)
