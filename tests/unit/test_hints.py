"""What clients say of their requests: how it is read, and what admission makes of it."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy import returns as returns_module
from saria_vllm.policy.admission import REASONS, Return
from saria_vllm.policy.hints import NO_HINTS, SESSION_CHARS_MAX, Hints, parse_hints
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.returns import Returns
from saria_vllm.policy.tiers import Tiers
from saria_vllm.sim.arrivals import arrivals, arrivals_with_ids, repeated
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.hinting import HintMode, ThreadHints
from saria_vllm.sim.simulator import SimConfig, SimResult, Simulator
from saria_vllm.sim.trace import Request, Session, id_runs
from tier_steps import blocks, end, evict_all, keys_of, make_tiers

# Reading them.


def test_hints_are_read() -> None:
    assert parse_hints(None) == parse_hints({}) == (NO_HINTS, [])
    said = {"session": "a7", "last": True, "no_store": True, "no_load": False}
    assert parse_hints(said) == (Hints("a7", True, True, False), [])
    assert parse_hints({"session": None, "last": None}) == (NO_HINTS, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": 7}, {"session": ""}, {"session": "x" * (SESSION_CHARS_MAX + 1)}, {"session": ["a"]},
        {"last": 1}, {"no_store": "true"}, {"no_load": {}}, {"sesion": "a"}, {7: "a", (): 1},
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_hint_is_left_out_and_the_others_are_taken(wrong: dict[Any, Any]) -> None:
    right = {"session": "a7", "last": True, "no_store": True}
    hints, complaints = parse_hints({**right, **wrong})
    assert len(complaints) == 1
    assert "expected" in complaints[0]
    assert hints == NO_HINTS._replace(**{key: value for key, value in right.items() if key not in wrong})


@pytest.mark.parametrize("wrong", ["a7", 7, True, ["session"], 0.5])
def test_what_is_no_object_is_no_hint(wrong: object) -> None:
    hints, complaints = parse_hints(wrong)
    assert hints == NO_HINTS
    assert len(complaints) == 1


def test_complaints_are_few_and_short_whatever_was_sent() -> None:
    _, complaints = parse_hints({f"k{number}" * 1000: "v" * 1000 for number in range(1000)} | {"last": "x" * 1000})
    assert len(complaints) == 2
    assert all(len(complaint) < 100 for complaint in complaints)


# Admission.


def turn(tiers: Tiers, keys: str, now: float, session: str = "", last: bool = False) -> None:
    """A request computes and stores its chunks, one for each letter."""
    prefix = Prefix([key.encode() for key in keys])
    tiers.arrived(prefix, 0, now, Hints(session, last))
    job, _ = tiers.plan_store(prefix, 0, len(keys), blocks(0, len(keys)), now)
    if job is not None:
        end(tiers, job)


def evicted(tiers: Tiers, now: float) -> tuple[str, dict[str, int]]:
    """What was written when all of DRAM was evicted, and the reasons so far."""
    written = b"".join(sorted(keys_of(evict_all(tiers, now)))).decode()
    counts = tiers.chunks.counts
    return written, {r.name: counts[f"admission:{r.name}"] for r in REASONS if f"admission:{r.name}" in counts}


def ready(**policy: Any) -> Tiers:
    return make_tiers(24, persist_records=100, segments_max=100, admission=AdmissionConfig(**policy))


@pytest.mark.parametrize("session", ["", "A"])
def test_the_chunks_of_a_session_that_has_ended_are_not_written(session: str) -> None:
    tiers = ready()
    turn(tiers, "abcd", 0.0, session)
    turn(tiers, "abcdef", 1.0, session, last=True)
    turn(tiers, "xy", 2.0, "B")
    assert evicted(tiers, 10.0) == ("xy", {"session_ended": 6, "return_likely": 2})


def test_an_end_is_believed_whatever_the_threshold_and_teaches_nothing() -> None:
    tiers = ready(threshold=0.001)
    admission = tiers._admission
    assert isinstance(admission, Return)
    turn(tiers, "abcd", 0.0, "A", last=True)
    assert evicted(tiers, 10.0) == ("", {"session_ended": 4})
    assert not admission.returns._bursts


@pytest.mark.parametrize("first", ["A", "B"])
def test_what_another_session_shares_stays_alive_whoever_touched_it_last(first: str) -> None:
    tiers = ready()
    for number, session in enumerate("AB" if first == "A" else "BA"):
        turn(tiers, "st" + session.lower() + session, float(number), session)
    turn(tiers, "staAz", 2.0, "A", last=True)
    assert evicted(tiers, 10.0) == ("Bbst", {"session_ended": 3, "return_likely": 4})


def test_a_fork_of_a_session_that_has_ended_keeps_it_alive() -> None:
    tiers = ready()
    turn(tiers, "abcd", 0.0, "A", last=True)
    turn(tiers, "abcx", 1.0, "B")
    assert evicted(tiers, 10.0) == ("abcx", {"session_ended": 1, "return_likely": 4})


def test_a_session_that_takes_another_path_leaves_its_own_branch_and_no_other() -> None:
    def run(named: bool) -> tuple[Tiers, Returns]:
        tiers = ready()
        turn(tiers, "stabcd", 0.0, "A" if named else "")
        turn(tiers, "stuvwx", 1.0, "B" if named else "")
        turn(tiers, "stABC", 2.0, "A" if named else "")
        admission = tiers._admission
        assert isinstance(admission, Return)
        return tiers, admission.returns

    tiers, returns = run(named=True)
    assert [returns.left_at(visit) for visit in (1, 2, 3)] == [-1, -1, -1]
    assert evicted(tiers, 10.0) == ("ABCstuvwx", {"branch_left": 4, "return_likely": 9})
    tiers, returns = run(named=False)
    assert [returns.left_at(visit) for visit in (1, 2, 3)] == [2, 2, -1], "B's was not left"


def test_what_was_generated_and_is_not_in_the_next_prompt_is_left() -> None:
    tiers = ready()
    prefix = Prefix([b"a", b"b"])
    tiers.arrived(prefix, 0, 0.0, Hints("A"))
    prefix.keys.extend([b"g", b"h"])
    job, _ = tiers.plan_store(prefix, 0, 4, blocks(0, 4), 0.0)
    assert job is not None
    end(tiers, job)
    turn(tiers, "abgxy", 1.0, "A")
    assert evicted(tiers, 10.0) == ("abgxy", {"branch_left": 1, "return_likely": 5})


def test_requests_without_a_session_do_not_leave_the_branch_of_one() -> None:
    tiers = ready()
    turn(tiers, "stabcd", 0.0, "A")
    turn(tiers, "stuv", 1.0)
    admission = tiers._admission
    assert isinstance(admission, Return)
    assert admission.returns.left_at(1) == -1
    assert evicted(tiers, 10.0)[0] == "abcdstuv"


def test_a_client_that_returns_to_what_it_left_is_not_believed_any_more() -> None:
    """Two threads under one name."""
    tiers = ready()
    turn(tiers, "stabcd", 0.0, "A")
    turn(tiers, "stuvwx", 1.0, "A")
    turn(tiers, "stabcde", 2.0, "A")
    turn(tiers, "stuvwxy", 3.0, "A")
    assert evicted(tiers, 10.0) == ("abcdestuvwxy", {"return_likely": 12})


@pytest.mark.parametrize("session", ["", "A"])
def test_an_end_that_was_none_is_not_believed_again(session: str) -> None:
    tiers = ready()
    for number, keys in enumerate(("ab", "abc", "abcd")):
        turn(tiers, keys, float(number), session, last=True)
    assert evicted(tiers, 10.0) == ("abcd", {"return_likely": 4})


def test_a_name_may_be_used_again_for_another_conversation() -> None:
    tiers = ready()
    turn(tiers, "abc", 0.0, "A", last=True)
    turn(tiers, "xyz", 1.0, "A")
    turn(tiers, "xyzu", 2.0, "A", last=True)
    assert evicted(tiers, 10.0) == ("", {"session_ended": 7})


def test_policies_that_learn_nothing_do_not_listen() -> None:
    def run(session: str, last: bool) -> dict[str, int]:
        tiers = ready(policy="saria", evictions=1)
        turn(tiers, "abcd", 0.0, session)
        turn(tiers, "abxy", 1.0, session, last)
        return evicted(tiers, 10.0)[1]

    assert run("A", True) == run("", False) == {"eviction_count": 6}


def test_sessions_are_forgotten_with_their_last_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_module, "VISITS_MAX", 10)
    returns, rng = Returns(64), random.Random(1)
    for number in range(500):
        session = f"s{number if number % 2 else rng.randrange(5)}"
        returns.visit(50, 0, 0, {}, float(number), Hints(session))
        assert len(returns._sessions) <= len(returns._visits) <= 10
        assert set(returns._sessions.values()) <= set(returns._visits)
    assert returns.last_visit("s499") == 500
    assert returns.last_visit("s101") == 0


# The simulator.


def agents(seed: int) -> Trace:
    """Sessions that share a system prompt, come back after pauses, and now and then begin again behind it. Between them
    are threads that ask twice and never again."""
    rng, sessions, fresh = random.Random(seed), [], 1000
    for number in range(40):
        requests, ids, now = [], list(range(20)), rng.uniform(0, 5000)
        for _ in range(12 if number % 2 else 2):
            if len(ids) > 120:
                ids = ids[:20]
            more = rng.randrange(5, 40)
            ids = ids + list(range(fresh, fresh + more))
            fresh += more
            requests.append(Request(f"s{number}", 0, now, 64 * len(ids), 1, "unknown", tuple(id_runs(ids))))
            now += rng.choice([20.0, 60.0, 600.0])
        sessions.append(Session(f"s{number}", 64, 0, 0, "", tuple(requests)))
    return Trace(sessions, "compact", True, 0)


def simulated(trace: Trace, mode: HintMode, policy: str = "return") -> SimResult:
    config = SimConfig(64, 300 * 64, 100_000 * 64, AdmissionConfig(policy=policy))  # type: ignore[arg-type]
    simulator = Simulator(config, hints=ThreadHints(trace, mode))
    list(simulator.run(arrivals_with_ids(trace, [], 64)))
    simulator.tiers.check()
    return simulator.result


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hints_save_writes_and_lose_no_hits(seed: int) -> None:
    trace = agents(seed)
    none, session, stop, both = (simulated(trace, mode) for mode in get_args(HintMode))
    assert "admission:session_ended" not in none.counts | session.counts
    assert min(stop.counts["admission:session_ended"], both.counts["admission:session_ended"]) > 1000
    assert both.ssd_write_tokens < session.ssd_write_tokens < 0.96 * none.ssd_write_tokens
    assert both.ssd_write_tokens < stop.ssd_write_tokens < none.ssd_write_tokens
    assert both.ssd_hit_tokens > max(session.ssd_hit_tokens, stop.ssd_hit_tokens)
    assert min(session.ssd_hit_tokens, stop.ssd_hit_tokens) >= none.ssd_hit_tokens
    assert both.dram_hit_tokens == none.dram_hit_tokens, "what DRAM holds is not the hints' business"


def test_hints_change_nothing_for_a_policy_that_does_not_listen() -> None:
    trace = agents(2)
    assert simulated(trace, "both", "saria").counts == simulated(trace, "none", "saria").counts


def test_a_thread_is_a_session_and_its_last_request_says_so() -> None:
    def request(thread: int, time_s: float) -> Request:
        return Request("s", thread, time_s, 64, 1, "unknown", ((1, 1),))

    requests = (request(0, 0.0), request(1, 1.0), request(1, 1.0), request(0, 5.0))
    trace = Trace([Session("s", 64, 0, 0, "", requests)] * 2, "compact", False, 0)

    def said(mode: HintMode) -> list[Hints]:
        hints = ThreadHints(trace, mode)
        found = [hints(session, each) for _, session, each in arrivals(trace, [0.0, 100.0])]
        assert not hints._to_come
        return found[:4]

    assert said("none") == [NO_HINTS] * 4
    assert said("session") == [Hints("0.0"), Hints("0.1"), Hints("0.1"), Hints("0.0")]
    assert said("stop") == [Hints(), Hints(), Hints(last=True), Hints(last=True)]
    assert said("both") == [Hints("0.0"), Hints("0.1"), Hints("0.1", True), Hints("0.0", True)]
    hints = ThreadHints(trace, "both")
    copies = [hints(session, each) for _, session, each in repeated(trace, [1, 2], lambda copy: [0.0, 9.0])]
    assert sum(each.last for each in copies) == 3 * 2 * 2
    assert len({each.session for each in copies}) == 3 * 2 * 2
