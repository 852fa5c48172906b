"""Every form of trace is told by its content, read into the same sessions, and refused with the place named."""

import gzip
import json
from pathlib import Path

import pytest

from saria_vllm.errors import TraceError
from saria_vllm.sim.arrivals import arrivals_with_ids, chunk_ids, starts
from saria_vllm.sim.formats import read_trace
from saria_vllm.sim.trace import id_runs, read_sessions

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"

COMPACT = {
    "id": "c", "block_size": 64, "tool_tokens": 128, "system_tokens": 64,
    "requests": [
        {"t": 2.0, "th": 0, "in": 330, "out": 9, "keep": 0, "add": [[1, 5]], "stop": "tool_use"},
        {"t": 9.0, "th": 0, "in": 400, "out": 9, "keep": 4, "add": [[8, 2]]},
    ],
}  # fmt: skip
NESTED = {"t": 1.0, "type": "n", "in": 64, "out": 1, "hash_ids": [40]}
WEKA = {
    "id": "w", "models": ["m"], "block_size": 64, "tool_tokens": 128, "system_tokens": 64,
    "requests": [
        {"t": 0.0, "type": "s", "model": "m", "in": 330, "out": 9, "hash_ids": [1, 2, 3, 4, 5], "stop": ""},
        {
            "t": 30.5, "type": "subagent", "agent_id": "a", "tool_tokens": 64, "system_tokens": 0,
            "requests": [
                {"t": 0.0, "type": "n", "in": 128, "out": 3, "hash_ids": [20, 21]},
                {"t": 5.0, "type": "n", "in": 192, "out": 3, "hash_ids": [20, 21, 22], "stop": "end_turn"},
                {"t": 6.0, "type": "subagent", "requests": [NESTED]},
            ],
        },
        {"t": 20.0, "type": "n", "in": 400, "out": 9, "hash_ids": [1, 2, 3, 4, 8, 9], "stop": "tool_use"},
    ],
}  # fmt: skip
MOONCAKE = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}
ROUND = {
    "session_id": "claude:1", "round_index": 0, "prefix_tokens": 100, "newly_append_tokens": 100, "output_tokens": 60,
    "timing_events": [
        {"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.500Z"},
        {"event_type": "tool_call", "timestamp": "2026-06-01T05:40:30Z"},
    ],
}  # fmt: skip
NEXT_ROUND = ROUND | {
    "round_index": 1, "prefix_tokens": 260, "newly_append_tokens": 60,
    "timing_events": [
        {"event_type": "tool_result", "timestamp": "2026-06-01T05:40:31Z"},
        {"event_type": "tool_result", "timestamp": "2026-06-01T05:40:40.500Z"},
        {"event_type": "text", "timestamp": "2026-06-01T05:40:41Z"},
    ],
}  # fmt: skip
CSV = """session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
b,10,1,300,100,50,0
a,117,0,0,130,100,300
b,10,0,0,200,100,1500
"""
HEADER = {"saria_trace": 1, "chunk_tokens": 64, "started": 5.0}
RECORDED = {"t": 1.5, "in": 70, "out": 3, "keep": 0, "of": None, "add": "AAAAAAAAAAA="}


def lines(*rows):
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "form", "absolute", "sessions"),
    [
        (lines(COMPACT, COMPACT), "compact", False, 2),
        (json.dumps(WEKA), "weka", False, 1),
        (json.dumps(WEKA, indent=2), "weka", False, 1),
        (lines(WEKA, WEKA), "weka", False, 2),
        (lines(MOONCAKE, MOONCAKE), "mooncake", True, 2),
        (CSV, "tracelab", False, 2),
        (lines(ROUND, NEXT_ROUND), "tracelab", False, 1),
        (lines(HEADER, RECORDED), "recorded", True, 1),
    ],
)
def test_the_form_is_told_by_the_content(tmp_path, text, form, absolute, sessions):
    plain, packed = write(tmp_path, text), tmp_path / "packed"
    packed.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(plain)
    assert trace == read_trace(str(packed)) == read_trace(plain, skip_bad=True)
    assert (trace.form, trace.absolute_times, len(trace.sessions), trace.skipped) == (form, absolute, sessions, 0)


def test_compact_is_what_the_compact_reader_reads(tmp_path):
    path = write(tmp_path, lines(COMPACT, COMPACT | {"id": "d"}))
    assert read_trace(path).sessions == list(read_sessions(path))


def test_weka_has_the_ids_of_the_compact_form(tmp_path):
    requests = [each for each in WEKA["requests"] if each["type"] != "subagent"]
    (weka,) = read_trace(write(tmp_path, json.dumps(WEKA | {"requests": requests}))).sessions
    (compact,) = read_trace(write(tmp_path, json.dumps(COMPACT))).sessions
    assert [each.runs for each in weka.requests] == [each.runs for each in compact.requests]
    assert [each.stop for each in weka.requests] == ["unknown", "tool_use"]


def test_sub_agents_are_threads_with_times_and_sizes_of_their_own(tmp_path):
    (session,) = read_trace(write(tmp_path, json.dumps(WEKA))).sessions
    found = [(each.time_s, each.thread, each.input_tokens) for each in session.requests]
    assert found == [(0.0, 0, 330), (20.0, 0, 400), (30.5, 1, 128), (35.5, 1, 192), (37.5, 2, 64)]
    main, _, agent, again, nested = (each.blocks() for each in session.requests)
    assert again[:2] == agent
    assert agent[0] not in main
    assert not set(nested) & {*main, *again}
    other = json.loads(json.dumps(WEKA)) | {"id": "x", "tool_tokens": 999}
    two = read_trace(write(tmp_path, lines(WEKA, other))).sessions[1]
    assert two.requests[2].blocks()[0] == agent[0]
    assert two.requests[2].blocks()[1] != agent[1]


def test_sub_agent_times_may_count_from_the_session(tmp_path):
    raw = json.loads(json.dumps(WEKA))
    raw["requests"][1]["requests"] = [{"t": 31.0, "type": "n", "in": 64, "out": 1, "hash_ids": [40]}]
    (session,) = read_trace(write(tmp_path, json.dumps(raw))).sessions
    assert session.requests[-1].time_s == 31.0


def test_global_weka_ids_are_shared_between_sessions(tmp_path):
    one, two = read_trace(write(tmp_path, lines(*[WEKA | {"hash_id_scope": "global"}] * 2))).sessions
    assert one.requests[0].blocks() == two.requests[0].blocks() == [1, 2, 3, 4, 5]


def test_a_directory_of_weka_files(tmp_path):
    for number in (2, 1, 3):
        write(tmp_path, json.dumps(WEKA | {"id": f"w{number}"}), f"trace_{number:04}.json")
    write(tmp_path, "not a trace", "notes.txt")
    trace = read_trace(tmp_path)
    assert (trace.form, [session.session for session in trace.sessions]) == ("weka", ["w1", "w2", "w3"])
    one, two, _ = (session.requests[0].blocks() for session in trace.sessions)
    assert one[:3] == two[:3]
    assert not set(one[3:]) & set(two)
    bad = write(tmp_path, lines(MOONCAKE), "trace_0002.json")
    with pytest.raises(TraceError, match="form 'mooncake'; expected one kv-cache-tester object") as caught:
        read_trace(tmp_path)
    assert str(caught.value).startswith(f"{bad}, line 1: ")
    trace = read_trace(tmp_path, skip_bad=True)
    assert ([session.session for session in trace.sessions], trace.skipped) == (["w1", "w3"], 1)


def test_a_directory_without_traces(tmp_path):
    with pytest.raises(TraceError, match=r"expected trace_\*.json of kv-cache-tester"):
        read_trace(tmp_path)


def test_mooncake_lines_are_sessions_with_real_times_and_global_ids(tmp_path):
    later = MOONCAKE | {"timestamp": 2000, "hash_ids": [0, 9]}
    one, two = read_trace(write(tmp_path, lines(MOONCAKE, later))).sessions
    assert (one.block_tokens, one.requests[0].time_s, two.requests[0].time_s) == (512, 1.5, 2.0)
    assert (one.requests[0].blocks(), two.requests[0].blocks()) == ([0, 7], [0, 9])
    assert chunk_ids(one.requests[0], 64, 512) == [0, 1, 2, 3, 4, 5, 6, 7, 56, 57]


def test_rounds_keep_what_lies_in_the_prefix(tmp_path):
    pulled_back = NEXT_ROUND | {"round_index": 2, "prefix_tokens": 130, "newly_append_tokens": 200}
    pulled_back["timing_events"] = [{"event_type": "text", "timestamp": "2026-06-01T05:50:20.500"}]
    (session,) = read_trace(write(tmp_path, lines(NEXT_ROUND, pulled_back, ROUND))).sessions
    one, two, three = session.requests
    assert [each.time_s for each in session.requests] == [0.0, 20.0, 600.0]
    assert [each.stop for each in session.requests] == ["tool_use", "end_turn", "end_turn"]
    assert [each.input_tokens for each in session.requests] == [200, 320, 330]
    # 200 tokens and 60 of answer fill 4 blocks, of which the first prompt shows 3.
    assert (len(one.blocks()), len(two.blocks()), len(three.blocks())) == (3, 5, 5)
    assert two.blocks()[:3] == one.blocks()
    assert three.blocks()[:2] == one.blocks()[:2]
    assert not set(three.blocks()[2:]) & set(two.blocks())


def test_csv_rounds_follow_output_and_wait(tmp_path):
    b, a = read_trace(write(tmp_path, CSV)).sessions
    assert (b.session, a.session, b.block_tokens) == ("b", "a", 64)
    assert [each.time_s for each in b.requests] == [0.0, pytest.approx(100 * 0.02 + 1.5)]
    assert [len(each.blocks()) for each in b.requests] == [3, 6]
    assert b.requests[1].blocks()[:3] == b.requests[0].blocks()
    assert not set(a.requests[0].blocks()) & set(b.requests[1].blocks())
    renamed = CSV.replace("session_id", "id")
    assert read_trace(write(tmp_path, renamed)).sessions == [b, a]


def weka_with(**change):
    return WEKA | {"requests": [WEKA["requests"][0] | change]}


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (COMPACT, COMPACT | {"requests": []}, "requests is empty; expected at least one"),
        (COMPACT, MOONCAKE, "missing required field .*; expected one JSON object per session"),
        (COMPACT, '{"id": \n', "; expected one JSON object per session"),
        (WEKA, weka_with(hash_ids=[1, 2]), r"requests\[0\]: 2 block ids for 330 tokens; expected 5, or one more"),
        (WEKA, weka_with(hash_ids=[-1, 2, 3, 4, 5]), r"add has \[-1, 1\]; expected"),
        (WEKA, weka_with(**{"in": 0}), "in 0, out 9; expected in above 0"),
        (WEKA, weka_with(t="x"), "got `str`.*; expected one kv-cache-tester object"),
        (WEKA, WEKA | {"block_size": 0}, "block_size is 0; expected tokens above zero"),
        (MOONCAKE, MOONCAKE | {"hash_ids": []}, "0 hash_ids for 700 tokens; expected 1, or one more"),
        (MOONCAKE, MOONCAKE | {"hash_ids": [1, -2]}, "expected input_length above 0 and the others and ids at least 0"),
        (MOONCAKE, MOONCAKE | {"timestamp": -1}, "timestamp -1"),
        (MOONCAKE, {"timestamp": 1}, "missing required field `input_length`; expected one Mooncake request"),
        (ROUND, ROUND | {"prefix_tokens": None}, "got `null`.*; expected one TraceLab round"),
        (ROUND, ROUND | {"prefix_tokens": -1}, "prefix -1, append 100, output 60; expected none below 0"),
        (ROUND, ROUND | {"timing_events": []}, "timing_events has no timestamp; expected at least one"),
        (
            ROUND, ROUND | {"timing_events": [{"event_type": "text", "timestamp": "noon"}]},
            "'noon'; expected ISO 8601 timestamps in timing_events",
        ),
        (CSV, "c,1,0,0,x,2,3\n", "could not convert string to float: 'x'; expected one number for each of round_idx"),
        (CSV, "c,1,0\n", "expected one number for each of"),
        (CSV, "c,1,0,0,0,2,3\n", "round 0 has prefix 0, append 0, output 2; expected .* a prompt above 0 tokens"),
        (CSV, "c,1,0,0,5,2,-3\n", "tool_wait_after_ms is -3"),
        (CSV, "c,1,0,0,inf,2,3\n", "cannot convert float infinity to integer"),
    ],
)  # fmt: skip
def test_malformed_lines_are_named_or_counted(tmp_path, good, bad, expected):
    path = write(tmp_path, lines(good, bad))
    number = lines(good).count("\n") + 1
    with pytest.raises(TraceError, match=expected) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {number}: ")
    trace = read_trace(path, skip_bad=True)
    assert trace.skipped == 1
    assert trace == read_trace(write(tmp_path, lines(good)))._replace(skipped=1)


def moon(**changes):
    return MOONCAKE | changes


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (COMPACT, COMPACT | {"block_size": 32, "tool_tokens": 0, "requests": [
            {"t": 0, "th": 0, "in": 32, "out": 1, "keep": 0, "add": [[1, 1]]}]},
         "blocks of 32 tokens; expected 64, as in the sessions before"),
        (COMPACT, COMPACT | {"block_size": 1 << 27}, "block_size is 134217728; expected tokens above zero, at most"),
        (COMPACT, COMPACT | {"requests": [
            {"t": 0, "th": 0, "in": 1 << 38, "out": 1, "keep": 0, "add": [[0, 1 << 32]]}]},
         r"requests\[0\]: a request at 0 s of 274877906944 tokens and 1 of answer; expected at most"),
        (COMPACT, COMPACT | {"requests": [{"t": 1e15, "th": 0, "in": 64, "out": 1, "keep": 0, "add": [[0, 1]]}]},
         r"a request at 1e\+15 s of 64 tokens and 1 of answer; expected at most 1e\+10 s and 67108864 tokens"),
        (COMPACT, COMPACT | {"requests": [{"t": 0, "th": 0, "in": 256, "out": 1, "keep": 0, "add": [[1, 2], [2, 2]]}]},
         "block id 2 is twice in one prompt; expected each once"),
        (WEKA, weka_with(hash_ids=[1, 2, 3, 4, 1]), "block id 1 is twice in one prompt"),
        (MOONCAKE, '{"other":' + "[" * 100_000 + "\n", "recursion depth .*; expected one Mooncake request"),
        (MOONCAKE, moon(hash_ids=[7, 7]), "block id 7 is twice in one prompt"),
        (MOONCAKE, moon(hash_ids=[1 << 64, 7]), "hash_ids has 18446744073709551616; expected ids of at most 64 bits"),
        (MOONCAKE, moon(timestamp=1e17), r"a request at 1e\+14 s"),
        (ROUND, ROUND | {"prefix_tokens": 10**15}, "of 1000000000000100 tokens and 60 of answer; expected at most"),
        (ROUND, ROUND | {"output_tokens": 1 << 27}, "of 200 tokens and 134217728 of answer; expected at most"),
        (CSV, "c,1,0,1e15,5,2,3\n", "of 1000000000000005 tokens"),
        (CSV, "c,1,0,0,5.5,2,3\n", "a count is not whole; expected one number for each of"),
        (CSV, "c,1,0,0,5,2,1e17\n", r"tool_wait_after_ms is 1e\+17"),
    ],
)  # fmt: skip
def test_what_no_request_can_be_is_malformed(tmp_path, good, bad, expected):
    """Or memory would end, ids would stand for other tokens, or the index would meet a chunk twice."""
    test_malformed_lines_are_named_or_counted(tmp_path, good, bad, expected)


def test_a_session_of_rounds_ends_where_time_does(tmp_path):
    rows = [f"c,1,{number},0,64,1,9e12\n" for number in range(4)]
    path = write(tmp_path, lines(CSV, *rows))
    with pytest.raises(TraceError, match=r"line 7: round 2 at 1.8e\+10 s; expected at most 1e\+10 s"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert ([len(session.requests) for session in trace.sessions], trace.skipped) == ([2, 1, 2], 1)


def test_a_first_line_that_nests_without_end_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match=r"line 1: .*recursion depth.*; expected a trace"):
        read_trace(write(tmp_path, '{"requests":' * 100_000))


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path):
    for good in (CSV, lines(COMPACT), lines(MOONCAKE)):
        plain = read_trace(write(tmp_path, good))
        assert read_trace(write(tmp_path, "\ufeff" + good)) == plain


def test_blank_lines_give_no_session_the_ids_of_another(tmp_path):
    for number, blank in enumerate(("\n", "")):
        write(tmp_path, blank + json.dumps(WEKA), f"trace_{number:04}.json")
    one, two = (session.requests[0].blocks() for session in read_trace(tmp_path).sessions)
    assert not set(one[3:]) & set(two)


def test_a_directory_has_one_size_of_blocks(tmp_path):
    write(tmp_path, json.dumps(WEKA), "trace_0001.json")
    other = weka_with(hash_ids=[1])
    bad = write(tmp_path, json.dumps(other | {"block_size": 512, "requests": other["requests"][:1]}), "trace_0002.json")
    with pytest.raises(TraceError, match="blocks of 512 tokens; expected 64") as caught:
        read_trace(tmp_path)
    assert str(caught.value).startswith(f"{bad}, line 1: ")


def test_the_good_lines_after_a_bad_first_one_are_read(tmp_path):
    path = write(tmp_path, lines('{"timestamp": 12\n', "hello\n", MOONCAKE, MOONCAKE))
    with pytest.raises(TraceError, match=r"line 1: .*; expected a trace: compact"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.form, len(trace.sessions), trace.skipped) == ("mooncake", 2, 2)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "line 1: the file is empty; expected a trace: compact, weka"),
        (b"\n\n", "no sessions; expected a trace"),
        (b"hello\n", "line 1: JSON is malformed.*; expected a trace"),
        (b"[1, 2]\n", "line 1: no JSON object; expected a trace"),
        (b'{"a": 1, "b": 2}\n', r"line 1: keys \['a', 'b'\]; expected a trace"),
        (b'{"id":"\xff"}', "line 1: .*; expected a trace"),
        (
            b"session_id,round_idx,prefix_len,input_len\n",
            "line 1: no column output_len; expected session_id, round_idx",
        ),
        (gzip.compress(lines(MOONCAKE).encode(), mtime=0)[:-12], "expected a whole gzip"),
        (b"\x1f\x8bgarbage", "expected a whole gzip"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_files_without_one_good_line(tmp_path, data, expected, skip_bad):
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=expected) as caught:
        read_trace(path, skip_bad=skip_bad)
    assert str(path) in str(caught.value)


def test_what_can_be_read_of_a_file_that_was_cut_short(tmp_path):
    text = lines(*(MOONCAKE | {"timestamp": each * each, "output_length": each} for each in range(2000)))
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(TraceError, match="expected a whole gzip"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.skipped, 100 < len(trace.sessions) < 2000) == (1, True)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="cannot be opened: No such file or directory; expected a trace file"):
        read_trace(tmp_path / "absent")


def test_id_runs():
    assert id_runs([5, 6, 7, 9, 1, 2, 2]) == [(5, 3), (9, 1), (1, 2), (2, 1)]
    assert id_runs([]) == []
    assert id_runs([0, 1]) == [(0, 2)]
    assert id_runs([-1, 0]) == [(-1, 2)]


@pytest.mark.parametrize(
    ("name", "form", "sessions", "requests"),
    [
        ("weka_small_48.jsonl.gz", "compact", 48, 1397),
        ("mooncake_fast25_synthetic_trace.jsonl.gz", "mooncake", 3993, 3993),
        ("tracelab_replay_example_multi_session_large.csv", "tracelab", 48, 303),
        ("tracelab_example_sessions_sanitized.jsonl.gz", "tracelab", 2, 19),
    ],
)
def test_real_traces_are_prefix_trees(name, form, sessions, requests):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    trace = read_trace(path)
    assert (trace.form, len(trace.sessions), trace.skipped) == (form, sessions, 0)
    before = {}
    count = 0
    for _, number, request, ids in arrivals_with_ids(trace, starts(sessions, 3600.0, 0), 64):
        count += 1
        assert len(ids) == request.input_tokens // 64, (number, request[:4])
        assert all(before.setdefault(each, last) == last for last, each in zip([-1, *ids], ids, strict=False))
    assert count == requests
