"""Recorder and reader: what was recorded is read back, small, bounded and without keys."""

import base64
import gzip
import hashlib
import json
import random

import pytest

from saria_vllm.errors import TraceError
from saria_vllm.sim.formats import read_trace
from saria_vllm.sim.recording import FULL, Recorder

SALT = bytes(range(32))


def keys(*names):
    """Chained keys: each names the whole prefix up to it."""
    found, before = [], b""
    for name in names:
        before = hashlib.sha256(before + str(name).encode()).digest()
        found.append(before)
    return found


def recorder(**changes):
    return Recorder(SALT, 64, **({"bytes_max": 1 << 24} | changes))


def prompts(rng, count):
    """Prompts of interleaved sessions: growing, pulled back, branching off, sharing a beginning."""
    sessions = [[f"system{rng.randrange(2)}", "tools"] for _ in range(8)]
    for turn in range(count):
        session = rng.choice(sessions)
        if rng.random() < 0.2:
            del session[rng.randint(1, len(session)) :]
        session += [f"{turn}.{n}" for n in range(rng.randrange(12))]
        yield list(session)


@pytest.mark.parametrize("limits", [{}, {"requests_max": 1}, {"requests_max": 3}, {"keys_max": 40}, {"keys_max": 1}])
def test_round_trip(tmp_path, limits):
    rng = random.Random(str(limits))
    asked = list(prompts(rng, 200))
    made = recorder(**limits)
    lines = [made.header(1000.0)]
    for turn, names in enumerate(asked):
        lines.append(made.record(turn / 3, keys(*names), len(names) * 64 + rng.randrange(64), turn))
        assert len(made._owner) <= max(made._keys_max, 0)
        assert len(made._chains) <= made._requests_max
        assert sum(len(chain.keys) for chain in made._chains) == len(made._owner)
    assert made.bytes_written == sum(map(len, lines))
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines))
    trace = read_trace(path)
    assert (trace.form, trace.absolute_times, trace.skipped) == ("recorded", True, 0)
    ids = {}
    for turn, (names, session) in enumerate(zip(asked, trace.sessions, strict=True)):
        (request,) = session.requests
        assert (session.block_tokens, request.output_tokens, request.input_tokens // 64) == (64, turn, len(names))
        assert request.time_s == pytest.approx(turn / 3, abs=1e-3)
        for key, each in zip(keys(*names), request.blocks(), strict=True):
            assert ids.setdefault(key, each) == each
    assert len(set(ids.values())) == len(ids)


def test_a_growing_prompt_costs_its_new_chunks_only():
    made = recorder()
    names = [f"a{n}" for n in range(1500)]
    first = made.record(0.0, keys(*names), 96_000, 10)
    names += ["b0", "b1"]
    second = made.record(1.0, keys(*names), 96_128, 10)
    assert len(first) < 1500 * 11 + 100
    assert len(second) < 110
    line = json.loads(second)
    assert (line["keep"], line["of"], len(base64.b64decode(line["add"]))) == (1500, 0, 16)


def test_a_growing_prompt_stays_one_run_between_other_sessions(tmp_path):
    made = recorder()
    data = made.header(0.0)
    for turn in range(1, 50):
        for session in "ab":
            names = [f"{session}{n}" for n in range(turn)]
            data += made.record(0.0, keys("shared", *names), 64 * (turn + 1), 1)
    (tmp_path / "t").write_bytes(data)
    assert max(len(session.requests[0].runs) for session in read_trace(tmp_path / "t").sessions) == 2


def test_keys_past_the_prompt_are_left_out_and_no_key_is_in_the_file():
    made = recorder()
    data = made.record(0.0, keys("a", "b", "c"), 130, 90)
    assert len(base64.b64decode(json.loads(data)["add"])) == 16
    for key in keys("a", "b", "c"):
        unsalted = hashlib.blake2b(key, digest_size=8).digest()
        assert key[:8] not in base64.b64decode(json.loads(data)["add"])
        assert unsalted not in base64.b64decode(json.loads(data)["add"])
    other = Recorder(bytes(32), 64, bytes_max=1000).record(0.0, keys("a", "b", "c"), 130, 90)
    assert json.loads(other)["add"] != json.loads(data)["add"]


def test_the_last_line_says_that_the_limit_was_reached(tmp_path):
    made = recorder(bytes_max=600)
    lines = [made.header(0.0)]
    while not made.full:
        lines.append(made.record(0.0, keys(len(lines)), 64, 1))
    assert lines[-1] == FULL
    assert made.record(0.0, keys("x"), 64, 1) == b""
    assert 500 < sum(map(len, lines)) == made.bytes_written <= 600
    (tmp_path / "t").write_bytes(b"".join(lines))
    assert len(read_trace(tmp_path / "t").sessions) == len(lines) - 2


@pytest.mark.parametrize("salt", [b"", bytes(15), bytes(65)])
def test_a_salt_that_hides_nothing_is_refused(salt):
    with pytest.raises(ValueError, match="not 16 to 64"):
        Recorder(salt, 64, bytes_max=1000)


def test_a_restarted_server_goes_on_in_the_same_file(tmp_path):
    first, second = recorder(), Recorder(bytes(32), 64, bytes_max=1 << 20)
    data = first.header(1000.0) + first.record(1.0, keys("a"), 64, 1)
    data += first.record(2.0, keys("a", "b"), 128, 1)[:-9]
    data += second.header(1060.0, appending=True) + second.record(5.0, keys("a"), 64, 1)
    data += second.record(6.0, keys("a", "b"), 128, 1)
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(data))
    with pytest.raises(TraceError, match="line 3: "):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert trace.skipped == 1
    one, two, three = (session.requests[0] for session in trace.sessions)
    assert [one.time_s, two.time_s, three.time_s] == [1.0, 65.0, 66.0]
    assert two.blocks() == three.blocks()[:1]
    assert not set(one.blocks()) & set(three.blocks())


GOOD = {"t": 1, "in": 128, "out": 1, "keep": 0, "of": None, "add": base64.b64encode(bytes(range(16))).decode()}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"t": -1}, "t -1, in 128, out 1, add of 16 bytes; expected t and out of at least 0"),
        ({"in": 0}, "in 0"),
        ({"out": -2}, "out -2"),
        ({"add": "AAAA"}, "add of 3 bytes; expected .* 8 bytes a chunk"),
        ({"add": "*"}, r"Invalid base64 encoded string - at `\$.add`; expected one request"),
        ({"in": "x"}, r"Expected `int`, got `str` - at `\$.in`"),
        ({"of": 1}, "of is 1; expected a request line before this one"),
        ({"of": 0, "keep": 3}, "keep is 3; expected 0 to 2, the chunks of request 0"),
        ({"keep": 1}, "keep is 1; expected 0 to 0, the chunks of request None"),
        ({"of": 0, "keep": 1}, "3 chunks for 128 tokens; expected at most 2"),
        ({"of": 0, "keep": 1, "in": 192}, "block id 4294967296 is twice in one prompt; expected each once"),
        ({"t": 1e300}, r"a request at 1e\+300 s of 128 tokens"),
        ({"in": 10**30}, "expected at most 1e"),
    ],
)
def test_malformed_lines_are_named(tmp_path, change, expected):
    header = {"saria_trace": 1, "chunk_tokens": 64, "started": 0}
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (header, GOOD, GOOD | change, GOOD)))
    with pytest.raises(TraceError, match=expected) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.sessions), trace.skipped) == (2, 1)


def test_times_begin_at_0_when_a_clock_was_set_back_between_two_starts(tmp_path):
    """Before 0 the model of time would make reloads longer as time goes by."""
    headers = ({"saria_trace": 1, "chunk_tokens": 64, "started": started} for started in (1000, 400))
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(each) for header in headers for each in (header, GOOD)))
    assert [session.requests[0].time_s for session in read_trace(path).sessions] == [600, 0]


def test_what_stands_on_a_malformed_line_is_malformed_too(tmp_path):
    header = {"saria_trace": 1, "chunk_tokens": 64, "started": 0}
    lines = [header, GOOD | {"in": 1}, GOOD | {"of": 0, "keep": 0}, GOOD | {"of": None}]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in lines))
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.sessions), trace.skipped) == (1, 2)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('{"saria_trace": 2, "chunk_tokens": 64}', "saria_trace 2, chunk_tokens 64; expected version 1"),
        ('{"saria_trace": 1, "chunk_tokens": 0}', "chunk_tokens 0; expected version 1 and chunk_tokens above 0"),
        ('{"saria_trace": 1, "chunk_tokens": 67108865}', "chunk_tokens 67108865; expected .* at most 67108864"),
        ('{"saria_trace": 1, "chunk_tokens": 64, "started": -1e300}', r"started -1e\+300; expected unix seconds"),
        ('{"saria_trace": 1, "chunk_tokens": 128}', "chunk_tokens 128; expected 64, as in the header before"),
        ('{"saria_trace": 1, "chunk_tok', "line 3: .*; expected one request"),
    ],
)
def test_a_header_that_cannot_be_used_is_never_skipped(tmp_path, header, expected):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps({"saria_trace": 1, "chunk_tokens": 64}), json.dumps(GOOD), header]))
    with pytest.raises(TraceError, match=expected):
        read_trace(path, skip_bad=True)
