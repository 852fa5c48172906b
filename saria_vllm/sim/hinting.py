"""What the clients of a trace would say of their requests."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from saria_vllm.policy.hints import Hints
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.trace import Request

HintMode = Literal["none", "session", "stop", "both"]


class ThreadHints:
    """Hints of one request after the other, in order of time: a thread is a session, `stop` marks its last request."""

    def __init__(self, trace: Trace, mode: HintMode) -> None:
        self._trace, self._mode = trace, mode
        self._to_come: dict[int, Counter[int]] = {}
        """Requests by thread, of sessions that are under way."""

    def __call__(self, session: int, request: Request) -> Hints:
        requests = self._trace.sessions[session % len(self._trace.sessions)].requests
        to_come = self._to_come.setdefault(session, Counter(each.thread for each in requests))
        to_come[request.thread] -= 1
        last = not to_come[request.thread]
        if not any(to_come.values()):
            del self._to_come[session]
        named = self._mode in ("session", "both")
        return Hints(f"{session}.{request.thread}" if named else "", last and self._mode in ("stop", "both"))
