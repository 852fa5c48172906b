"""The trace reader: ids exactly as the format says, errors that name the place."""

import contextlib
import errno
import gzip
import io
import json
import os
import threading
from pathlib import Path

import pytest

from saria_vllm.errors import TraceError
from saria_vllm.sim.formats import read_trace
from saria_vllm.sim.prompts import PromptMaker, fitting_scale
from saria_vllm.sim.trace import by_time, read_sessions

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def session(**changes):
    """Tools and system prompt fill two and one blocks of 4 tokens; the second turn goes back one block."""
    raw = {
        "id": "s", "block_size": 4, "model": ["m"], "tool_tokens": 8, "system_tokens": 5,
        "requests": [
            {"t": 0.0, "th": 0, "in": 18, "out": 3, "keep": 0, "add": [[1, 4]], "stop": "tool_use"},
            {"t": 7.5, "th": 0, "in": 24, "out": 3, "keep": 3, "add": [[5, 2], [9, 1]]},
        ],
    }  # fmt: skip
    return raw | changes


def stream(*sessions):
    return io.BytesIO("\n".join(json.dumps(raw) for raw in sessions).encode())


def test_ids_follow_keep_and_add():
    (read,) = read_sessions(stream(session()))
    first, second = read.requests
    assert (first.input_tokens, first.output_tokens, first.stop, first.time_s) == (18, 3, "tool_use", 0.0)
    assert second.stop == "unknown"
    assert len(first.blocks()) == 4
    assert len(second.blocks()) == 6
    assert first.blocks()[:3] == second.blocks()[:3]
    assert not set(second.blocks()[3:]) & set(first.blocks())
    assert len({id for request in read.requests for id in request.blocks()}) == 7


def test_tools_and_system_prompt_are_shared_between_sessions_of_equal_lengths():
    same, other_system, other_tools = (
        session(id="same"), session(id="system", system_tokens=6), session(id="tools", tool_tokens=4, system_tokens=9)
    )  # fmt: skip
    one, two, three, four = (
        read.requests[0].blocks() for read in read_sessions(stream(session(), same, other_system, other_tools))
    )
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert one[:2] == three[:2]
    assert one[2] != three[2]
    assert not set(one) & set(four)


def test_sub_agents_have_their_own_prompt_and_their_own_thread():
    sub = {"t": 3.0, "th": 1, "in": 8, "out": 1, "keep": 0, "add": [[20, 2]]}
    raw = session(subagents=[{"th": 1, "t": 3.0, "tool_tokens": 4, "system_tokens": 0}])
    raw["requests"].append(sub)
    (read,) = read_sessions(stream(raw))
    assert [request.thread for request in read.requests] == [0, 1, 0]
    main, agent, again = (request.blocks() for request in read.requests)
    assert main[:3] == again[:3]
    assert not set(main) & set(agent)


def test_a_partial_last_block_may_have_an_id():
    raw = session()
    raw["requests"] = [{"t": 0, "th": 0, "in": 18, "out": 1, "keep": 0, "add": [[1, 5]]}]
    (read,) = read_sessions(stream(raw))
    assert len(read.requests[0].blocks()) == 5


def test_gzip_plain_path_and_stream_are_the_same(tmp_path):
    data = stream(session()).getvalue()
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    expected = list(read_sessions(io.BytesIO(data)))
    assert list(read_sessions(plain)) == list(read_sessions(str(packed))) == expected
    assert list(read_sessions(io.BytesIO(gzip.compress(data)))) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": "x"}, r"Expected `int`, got `str` - at `\$.block_size`"),
        ({"requests": []}, "requests is empty"),
        ({"tool_tokens": -1}, "tool_tokens -1"),
        ({"requests": [{"t": 0, "th": 0, "in": 8, "out": 1, "keep": 1, "add": []}]}, "keep is 1; expected 0 to 0"),
        ({"requests": [{"t": 0, "th": 0, "in": 8, "out": 1, "keep": 0, "add": [[1, 9]]}]}, "9 block ids for 8 tokens"),
        ({"requests": [{"t": 0, "th": 0, "in": 8, "out": 1, "keep": 0, "add": [[1, 0]]}]}, "add has"),
        ({"requests": [{"t": -1, "th": 0, "in": 8, "out": 1, "keep": 0, "add": [[1, 2]]}]}, "t -1"),
        ({"requests": [{"t": 0, "th": 0, "out": 1, "keep": 0, "add": []}]}, "missing required field `in`"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_what_was_expected(tmp_path, change, expected):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(stream(session(), session(**change)).getvalue())
    with pytest.raises(TraceError, match=expected) as caught:
        list(read_sessions(path))
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(TraceError, match="cannot be opened"):
        list(read_sessions(tmp_path / "absent"))
    for name, data, expected in (
        ("empty", b"", "the file is empty"),
        ("text", b"hello\n", "line 1: JSON is malformed"),
        ("latin", b'{"id":"\xff"}', "line 1"),
        ("cut", gzip.compress(stream(session()).getvalue(), mtime=0)[:-12], "expected a whole gzip"),
        ("garbage", b"\x1f\x8bgarbage", "expected a whole gzip"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match=expected):
            list(read_sessions(tmp_path / name))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_pipe_is_read_as_a_file_is(tmp_path, pack):
    data = stream(*(session(id=f"s{number}") for number in range(2000))).getvalue()
    expected = list(read_sessions(io.BytesIO(data)))
    for read in (lambda name: list(read_sessions(name)), lambda name: read_trace(name).sessions):
        reader, writer = os.pipe()

        def send(writer=writer):
            with contextlib.suppress(BrokenPipeError), open(writer, "wb", buffering=0) as file:
                file.write(pack(data)[:1])
                file.write(pack(data)[1:])

        thread = threading.Thread(target=send)
        thread.start()
        try:
            assert read(f"/dev/fd/{reader}") == expected
        finally:
            os.close(reader)
            thread.join()


@pytest.mark.parametrize("data", [b"", b"{", b"\x1f", b"\x1f\x8b"])
def test_a_pipe_with_next_to_nothing(data):
    for read in (lambda name: list(read_sessions(name)), read_trace):
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        try:
            with pytest.raises(TraceError, match=f"^/dev/fd/{reader}, .*; expected"):
                read(f"/dev/fd/{reader}")
        finally:
            os.close(reader)


class Broken(io.RawIOBase):
    """A file whose read number `good` fails as a bad disk does."""

    name = "broken"

    def __init__(self, good):
        self.good = good

    def read(self, _nbytes):
        self.good -= 1
        if self.good < 0:
            raise OSError(errno.EIO, "Input/output error")
        return b"{}"


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_disk_that_fails(good):
    with pytest.raises(TraceError, match=r"^broken, after line 0: .*Input/output error; expected a whole gzip"):
        list(read_sessions(Broken(good)))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "''"), ("a\0b", r"'a\x00b'"), ("no\nfile", r"'no\nfile'"), ("/dev/null/x", "/dev/null/x"), ("/", "/")],
)
def test_names_that_cannot_be_opened_are_one_line(name, shown):
    with pytest.raises(TraceError) as caught:
        list(read_sessions(name))
    assert str(caught.value).startswith(f"{shown}: cannot be opened: ")
    assert len(str(caught.value).splitlines()) == 1
    if name != "/":
        with pytest.raises(TraceError) as again:
            read_trace(name)
        assert str(again.value) == str(caught.value)


def test_by_time_merges_sessions():
    sessions = list(read_sessions(stream(session(), session(id="b"))))
    merged = list(by_time(sessions, [0.0, 5.0]))
    assert [(arrival.time_s, arrival.session, arrival.turn) for arrival in merged] == [
        (0.0, 0, 0), (5.0, 1, 0), (7.5, 0, 1), (12.5, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("scaled", [1, 2, 3, 4])
def test_prompts_share_prefixes_as_the_blocks_do(scaled):
    first, second = next(read_sessions(stream(session()))).requests
    maker = PromptMaker(5, (10, 500), 4, scaled)
    one, two = maker.prompt(first, 0), maker.prompt(second, 1)
    assert (len(one), len(two)) == (18 * scaled // 4, 24 * scaled // 4)
    assert one[: 3 * scaled] == two[: 3 * scaled]
    assert one[3 * scaled :] != two[3 * scaled : len(one)]
    assert all(10 <= token < 500 for token in one + two)
    assert PromptMaker(5, (10, 500), 4, scaled).prompt(first, 0) == one
    assert PromptMaker(6, (10, 500), 4, scaled).prompt(first, 0) != one


def test_fitting_scale_is_the_largest_that_fits():
    requests = next(read_sessions(stream(session()))).requests
    assert [fitting_scale(requests, 4, limit) for limit in (1, 6, 11, 12, 18, 24, 1000)] == [1, 1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("name", ["weka_small_48.jsonl.gz", "weka_350.jsonl.gz"])
def test_real_traces_agree_with_the_formats_own_decoder(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[:40]]
    for raw, read in zip(lines, read_sessions(path), strict=False):
        before: dict[int, list[int]] = {}
        reference = []
        for request in raw["requests"]:
            ids = before.get(request["th"], [])[: request["keep"]]
            for first, count in request["add"]:
                ids = ids + list(range(first, first + count))
            before[request["th"]] = ids
            reference.append((request["t"], request["th"], ids))
        reference.sort(key=lambda item: item[0])
        there: dict[int, int] = {}
        for (time_s, thread, ids), request in zip(reference, read.requests, strict=True):
            assert (request.time_s, request.thread, request.session) == (time_s, thread, raw["id"])
            blocks = request.blocks()
            assert len(blocks) == len(ids) == request.input_tokens // raw["block_size"]
            if thread == 0:
                assert all(there.setdefault(a, b) == b for a, b in zip(ids, blocks, strict=True))
