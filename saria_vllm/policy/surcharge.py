"""What a drive's write budget loses to others who write to the drive, and to the drive itself.

A drive says how much hosts have written to it: we and everybody else. What is more than our engines wrote is others'.
Some drives also say how much they wrote to their flash for it: that over what hosts wrote is the drive's own write
amplification. Wear of a time = amplification x what hosts wrote; of that an engine answers for its own bytes and for
its share of others'.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

AMPLIFICATION_MAX = 8.0
"""What a drive says beyond that is not believed."""

LEARNT_DAYS = 0.02
"""The amplification is an average over about so much of a day's budget."""

_EXABYTE = 2**60
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=_EXABYTE)]


class Reading(msgspec.Struct, frozen=True):
    """Totals of one moment, in bytes."""

    host_bytes: _Bytes
    """Written to the drive by anybody."""
    media_bytes: _Bytes
    """Written to flash by the drive; 0 where it does not say."""
    ours_bytes: _Bytes
    """Written to the drive by our engines together."""
    mine_bytes: _Bytes
    """Of that by this engine, as far as the budget in question bears it."""


class SurchargeState(msgspec.Struct):
    """What must survive a restart."""

    read_s: Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
    last: Reading
    early_bytes: _Bytes
    amplification: Annotated[float, msgspec.Meta(ge=1, le=AMPLIFICATION_MAX)]


class Surcharge:
    """See the module's text."""

    def __init__(self, budget_bytes_day: float) -> None:
        self._learnt_bytes = LEARNT_DAYS * budget_bytes_day
        self.amplification = 1.0
        self._last: Reading | None = None
        self._read = 0.0
        self._early = 0
        """Bytes of ours that the drive has not counted yet: writes are on their way when they are counted here."""

    def learn(self, reading: Reading, share: float, now: float) -> int:
        """What the time since the last reading used up beside this engine's own bytes, `share` of what others wrote
        included."""
        if max(reading.host_bytes, reading.media_bytes, reading.ours_bytes, reading.mine_bytes) > _EXABYTE:
            return 0  # No drive, and not to be kept.
        last, self._last, self._read = self._last, reading, now
        if last is None:
            return 0
        host, media, ours, mine = (
            getattr(reading, name) - getattr(last, name)
            for name in ("host_bytes", "media_bytes", "ours_bytes", "mine_bytes")
        )
        if min(host, ours, mine) < 0:  # Another drive, or files of ours that went.
            self._early = 0
            return 0
        if last.media_bytes and media >= 0 and host:
            known = (self.amplification * self._learnt_bytes + media) / (self._learnt_bytes + host)
            self.amplification = min(AMPLIFICATION_MAX, max(1.0, known))
        others = host - ours - self._early
        self._early = min(max(0, -others), int(self._learnt_bytes))
        return int((self.amplification - 1) * mine + self.amplification * share * max(0, others))

    def state(self, shift: float) -> SurchargeState | None:
        """`shift`: what to add to our clock for the wall's."""
        if self._last is None:
            return None
        return SurchargeState(self._read + shift, self._last, self._early, self.amplification)

    def restore(self, state: SurchargeState, shift: float, oldest: float) -> None:
        """What happened since a reading before `oldest` is nobody's who runs now."""
        self.amplification = state.amplification
        if state.read_s + shift >= oldest:
            self._last, self._early, self._read = state.last, state.early_bytes, state.read_s + shift
