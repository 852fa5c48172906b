"""`saria replay` against a small server that answers as vLLM does."""

import asyncio
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("aiohttp", reason="the replay extra is not installed")
pytest.importorskip("rich", reason="the replay extra is not installed")

from saria_vllm.cli import main
from saria_vllm.cli.replay_drive import Turn, classify, parse_counters
from saria_vllm.cli.replay_report import ttft

BLOCK = 4


class FakeVllm(ThreadingHTTPServer):
    """Serves one model; "reloads" from DRAM on a session's second turn, from SSD on its third, then from both."""

    daemon_threads = True

    def __init__(self, **behaviour):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = {"metrics": True, "fail": 0, "max_model_len": 4096, "details": True} | behaviour
        self.prompts = []
        self.in_flight = self.most_in_flight = 0
        self.counters = {("hit_tokens", "dram"): 0, ("hit_tokens", "ssd"): 0, ("ssd_written_bytes", ""): 0}
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet per answer: no waiting for delayed acknowledgements

    def log_message(self, *_):
        pass

    def reply(self, body, status=200, kind="application/json"):
        data = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        server = self.server
        if self.path in server.behaviour:
            self.reply(server.behaviour[self.path])
        elif self.path == "/v1/models":
            card = {"id": "tiny", "max_model_len": server.behaviour["max_model_len"], "root": "/nowhere"}
            self.reply(json.dumps({"data": [card]}))
        elif self.path == "/metrics" and server.behaviour["metrics"]:
            lines = ["# HELP vllm:saria_hit_tokens_total x", "vllm:num_requests_running 0"]
            for (name, tier), value in server.counters.items():
                label = f',tier="{tier}"' if tier else ""
                lines.append(f'vllm:saria_{name}_total{{engine="0",model_name="a,b"{label}}} {float(value)}')
                lines.append(f'vllm:saria_{name}_created{{engine="0",model_name="a,b"{label}}} 1.7e9')
            self.reply("\n".join(lines), kind="text/plain")
        else:
            self.reply("", 404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        with server.lock:
            number = len(server.prompts)
            turn = sum(prompt[: BLOCK * 3] == earlier[: BLOCK * 3] for earlier in server.prompts)
            server.prompts.append(prompt)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            if turn in (1, 3):
                server.counters["hit_tokens", "dram"] += len(prompt) // 2
            if turn in (2, 3):
                server.counters["hit_tokens", "ssd"] += len(prompt) // 2
                server.counters["ssd_written_bytes", ""] += 4096
        if number < server.behaviour["fail"]:
            self.reply(server.behaviour.get("refusal", '{"message": "out of vocabulary"}'), 400)
        elif "answer" in server.behaviour:
            self.reply(server.behaviour["answer"], kind="text/event-stream")
        else:
            details = {"cached_tokens": len(prompt) if turn else 0} if server.behaviour["details"] else None
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
            events = [{"choices": [{"text": "", "finish_reason": None}]}] * body["max_tokens"]
            events += [{"choices": [], "usage": usage}]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self.reply(text, kind="text/event-stream")
        with server.lock:
            server.in_flight -= 1


@pytest.fixture
def serve():
    servers = []

    def start(**behaviour):
        server = FakeVllm(**behaviour)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def trace(tmp_path):
    """Three sessions of five turns, each one block longer than the one before."""
    lines = []
    for number in range(3):
        first = {"t": 0.0, "th": 0, "in": 18, "out": 3, "keep": 0, "add": [[1, 4]]}
        more = [
            {
                "t": 10.0 * turn + number,
                "th": 0,
                "in": 18 + 4 * turn,
                "out": 3,
                "keep": 3 + turn,
                "add": [[4 + turn, 1]],
            }
            for turn in range(1, 5)
        ]
        lines.append({"id": f"s{number}", "block_size": BLOCK, "tool_tokens": 4 * number, "system_tokens": 0,
                      "requests": [first, *more]})  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def replay(capsys, server, *options):
    status = main(["replay", "--url", server.url, "--vocab", "16:512", *options])
    return status, capsys.readouterr()


def test_json_is_one_object_and_says_all(capsys, serve, trace):
    server = serve()
    status, output = replay(capsys, server, "--trace", trace, "--json", "--output-tokens", "2")
    report = json.loads(output.out)
    assert status == 0
    assert (report["sessions"], report["requests"], report["failed"]) == (3, 15, 0)
    assert report["prompt_tokens"] == sum(len(prompt) for prompt in server.prompts)
    classes = {name: row["ttft"]["n"] for name, row in report["classes"].items()}
    assert classes == {"first": 3, "dram": 3, "ssd": 3, "mixed": 3, "hbm": 3}
    assert [row["ttft"]["n"] for row in report["by_turn"]] == [3] * 5
    assert report["hit_tokens"]["dram"] == server.counters["hit_tokens", "dram"]
    assert report["ssd_written_bytes"] == 6 * 4096
    assert report["classes"]["ssd"]["ssd_written_bytes"] == 3 * 4096
    assert all(turn["output_tokens"] == 2 and turn["ttft_s"] > 0 for turn in report["turns"])


def test_equal_blocks_are_equal_tokens_in_every_run(capsys, serve, trace):
    one, two, other = serve(), serve(), serve()
    for server, seed in ((one, "7"), (two, "7"), (other, "8")):
        replay(capsys, server, "--trace", trace, "--json", "--seed", seed)
    assert one.prompts == two.prompts
    assert sorted(one.prompts) != sorted(other.prompts)
    session = [prompt for prompt in one.prompts if prompt[: BLOCK * 3] == one.prompts[0][: BLOCK * 3]]
    for early, late in itertools.pairwise(session):
        shared = len(early) // BLOCK * BLOCK
        assert early[:shared] == late[:shared]


def test_requests_are_sent_in_the_traces_order_of_time(capsys, serve, trace):
    status, output = replay(capsys, serve(), "--trace", trace, "--json", "--arrival-gap", "0")
    turns = [(turn["turn"], turn["session"]) for turn in json.loads(output.out)["turns"]]
    assert status == 0
    assert turns == sorted(turns)


def test_concurrency_is_bounded_and_sessions_stay_closed_loops(capsys, serve, trace):
    server = serve()
    status, output = replay(capsys, server, "--trace", trace, "--json", "--concurrency", "2")
    report = json.loads(output.out)
    assert status == 0
    assert server.most_in_flight <= 2
    for session in ("s0", "s1", "s2"):
        assert [turn["turn"] for turn in report["turns"] if turn["session"] == session] == list(range(5))
    assert report["hit_tokens"]["ssd"] > 0
    assert all(turn["counters"] is None for turn in report["turns"])


def test_no_more_requests_than_sessions_are_waited_for(capsys, serve, trace, monkeypatch):
    made = []
    create_task = asyncio.TaskGroup.create_task
    monkeypatch.setattr(asyncio.TaskGroup, "create_task", lambda *args: made.append(0) or create_task(*args))
    status, output = replay(capsys, serve(), "--trace", trace, "--json", "--concurrency", "100000")
    assert (status, json.loads(output.out)["requests"]) == (0, 15)
    assert len(made) == 3


def test_think_scale_waits(capsys, serve, trace):
    _, output = replay(
        capsys, serve(), "--trace", trace, "--json", "--think-scale", "0.01", "--arrival-gap", "0", "--concurrency", "3"
    )
    assert 0.4 <= json.loads(output.out)["seconds"] < 5


def test_table_for_people(capsys, serve, trace):
    status, output = replay(capsys, serve(), "--trace", trace)
    assert status == 0
    for text in ("By class", "By turn", "TTFT mean ms", "mixed", "written to SSD 24.00KiB"):
        assert text in output.out


def test_failed_requests_are_a_problem(capsys, serve, trace):
    status, output = replay(capsys, serve(fail=2), "--trace", trace)
    assert status == 1
    assert "2 failed" in output.out
    assert "out of vocabulary" in output.out


@pytest.mark.parametrize(
    "models",
    [
        b'{"data": null}', b'{"data": [{}]}', b'{"data": "abc"}', b'{"data": {}}', b"[1]", b"{}", b"<html>",
        b"\xff\xfe{", b"",
        b'{"data": [{"id": "m", "max_model_len": "4096"}]}', b'{"data": [{"id": "m", "max_model_len": -5}]}',
        b'{"data": [{"id": "m", "max_model_len": 1e999}]}',
        b'{"data": [{"id": "\\ud800"}]}', b'{"data":' + b"[" * 100_000,
    ],
    ids=lambda models: models[:50],
)  # fmt: skip
def test_a_server_of_another_kind_is_one_line(capsys, serve, trace, models):
    status, output = replay(capsys, serve(**{"/v1/models": models}), "--trace", trace)
    assert status == 1
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert "no OpenAI-compatible server answers" in output.err


EVENT = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"data: 5\n\n", "): 5"), (b"data: null\n\n", "): null"), (b"data: []\n\n", "): []"), (b"data: {{{\n\n", "{{{"),
        (b'data: {"choices": {"a": 1}}\n\n', "choices"), (b'data: {"choices": ["x"]}\n\n', "choices"),
        (EVENT + b'data: {"usage": [1]}\n\n', "usage"),
        (EVENT + b'data: {"usage": {"completion_tokens": "x"}}\n\n', "completion_tokens"),
        (EVENT + b'data: {"usage": {"completion_tokens": 1e999}}\n\n', "completion_tokens"),
        (EVENT + b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}\n\n', "cached_tokens"),
        (b"data: " + b'{"error":' + b"[" * 200_000 + b"\n\n", "[[["), (b"data: " + b"[" * 60_000 + b"\n\n", "[[["),
        (b"data: " + b"a" * 10_000_000 + b"\n\n", "aaa"), (b"data: \xff\n\n", "malformed"),
        (b'data: {"error": "\\ud800 out of memory"}\n\n', "out of memory"),
        (b'data: {"error": "[/red] [bold"}\n\n', "[/red] [bold"), (b"data: [DONE]\n\n", "no tokens"),
    ],
    ids=lambda value: value[-50:] if isinstance(value, bytes) else "",
)  # fmt: skip
def test_an_odd_answer_is_a_failed_turn_and_its_text_is_kept(capsys, serve, trace, answer, said):
    server = serve(answer=answer)
    status, output = replay(capsys, server, "--trace", trace, "--sessions", "1", "--json")
    report = json.loads(output.out, parse_constant=pytest.fail)
    assert (status, report["failed"], report["requests"]) == (1, 5, 5)
    assert all(said in turn["error"] and len(turn["error"]) < 700 for turn in report["turns"])
    status, output = replay(capsys, server, "--trace", trace, "--sessions", "1")
    assert status == 1
    assert "5 failed" in output.out


def test_a_refusal_that_is_no_text_keeps_its_status(capsys, serve, trace):
    status, output = replay(capsys, serve(fail=99, refusal=b"\xff\xfe broken"), "--trace", trace, "--json")
    report = json.loads(output.out)
    assert status == 1
    assert all("HTTP 400" in turn["error"] and "broken" in turn["error"] for turn in report["turns"])


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e999", "x", ""])
def test_values_that_are_no_counts_are_left_out(capsys, serve, trace, value):
    page = f'vllm:saria_hit_tokens_total{{tier="dram"}} {value}\nvllm:saria_ssd_written_bytes_total 5\n'
    server = serve(**{"/metrics": page.encode() + b"\xff\xfe\nvllm:saria_\nvllm:saria_{\n"})
    status, output = replay(capsys, server, "--trace", trace, "--json")
    report = json.loads(output.out, parse_constant=pytest.fail)
    assert (status, report["hit_tokens"]["dram"], report["ssd_written_bytes"]) == (0, 0, 0)
    assert replay(capsys, server, "--trace", trace)[0] == 0


def test_server_without_our_metrics_or_details(capsys, serve, trace):
    status, output = replay(capsys, serve(metrics=False, details=False), "--trace", trace, "--json")
    report = json.loads(output.out)
    assert status == 0
    assert report["hit_tokens"] is None
    assert report["cached_tokens"] is None
    assert set(report["classes"]) == {"first", "later"}


def test_prompts_are_scaled_to_the_model(capsys, serve, trace):
    server = serve(max_model_len=30)
    status, output = replay(capsys, server, "--trace", trace, "--json", "--output-tokens", "10")
    assert status == 0
    assert json.loads(output.out)["tokens_per_block"] == 2
    assert max(len(prompt) for prompt in server.prompts) == 34 * 2 // 4


def test_scale_with_a_longest_prompt_ends_sessions_early(capsys, serve, trace):
    options = ("--trace", trace, "--json", "--scale", "0.5", "--max-prompt-tokens", "13")
    server = serve()
    status, output = replay(capsys, server, *options)
    report = json.loads(output.out)
    assert status == 0
    assert (report["requests"], report["turns_left_out"]) == (9, 6)
    status, output = replay(capsys, serve(), *options, "--min-turns", "4")
    assert status == 2
    assert "no session has 4 prompts of at most 13 tokens" in output.err


def test_built_in_sessions_need_no_file(capsys, serve):
    server = serve()
    status, output = replay(
        capsys, server, "--sessions", "2", "--max-turns", "3", "--json", "--max-prompt-tokens", "600"
    )
    assert status == 0
    assert json.loads(output.out)["requests"] == 6
    assert all(16 <= token < 512 for prompt in server.prompts for token in prompt)


@pytest.mark.parametrize(
    "options",
    [
        ["--scale", "2"], ["--scale", "x"], ["--sessions", "0"], ["--vocab", "9"], ["--vocab", "9:3"], ["--nonsense"],
        ["--output-tokens", "0"], ["--think-scale", "-1"],
        *([key, "1" + "0" * 400] for key in ("--sessions", "--concurrency", "--timeout", "--max-prompt-tokens")),
        ["--sessions", "100001"],
    ],
)  # fmt: skip
def test_bad_usage_is_status_2(capsys, options):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *options])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert options[0] in err and err.count("\n") == 1


def test_a_bad_trace_is_status_2_and_nothing_is_sent(capsys, serve, trace):
    server = serve()
    with open(trace, "a") as file:
        file.write("\n{")
    status, output = replay(capsys, server, "--trace", trace)
    assert status == 2
    assert f"{trace}, line 4" in output.err
    assert server.prompts == []


@pytest.mark.parametrize("name", ["", "no\0name"])
def test_a_trace_without_a_usable_name_is_status_2(capsys, serve, name):
    server = serve()
    status, output = replay(capsys, server, "--trace", name)
    assert (status, server.prompts) == (2, [])
    assert f"{name!r}: cannot be opened: " in output.err
    assert len(output.err.splitlines()) == 1


def test_no_server_is_status_1(capsys):
    assert main(["replay", "--url", "http://127.0.0.1:9", "--vocab", "16:512"]) == 1
    assert "no OpenAI-compatible server answers" in capsys.readouterr().err


def test_unknown_model_names_what_is_served(capsys, serve):
    status, output = replay(capsys, serve(), "--model", "other")
    assert status == 1
    assert "it serves ['tiny']" in output.err


def test_counters_are_summed_over_engines():
    text = (
        'vllm:saria_hit_tokens_total{engine="0",model_name="m",tier="dram"} 5.0\n'
        'vllm:saria_hit_tokens_total{engine="1",model_name="m",tier="dram"} 7.0\n'
        "vllm:saria_store_bytes_total 9\nvllm:other 3\n# HELP vllm:saria_x y\n"
    )
    assert parse_counters(text) == {'hit_tokens{tier="dram"}': 12.0, "store_bytes": 9.0}


@pytest.mark.parametrize(
    ("turn", "cached", "dram", "ssd", "expected"),
    [
        (0, 90, 90, 0, "first"), (1, 90, 0, 0, "hbm"), (1, 90, 90, 0, "dram"), (1, 90, 0, 90, "ssd"),
        (1, 90, 40, 50, "mixed"), (1, 20, 20, 0, "miss"), (1, 0, 0, 0, "miss"), (1, None, 0, 90, "ssd"),
    ],
)  # fmt: skip
def test_classes(turn, cached, dram, ssd, expected):
    counters = {'hit_tokens{tier="dram"}': float(dram), 'hit_tokens{tier="ssd"}': float(ssd)}
    served = Turn("s", turn, 0, 120, 100, cached_tokens=cached, counters=counters)
    assert classify(served) == expected


def test_ttft_statistics():
    assert ttft([]) == {"n": 0, "mean": None, "p50": None, "p90": None}
    assert ttft([1, 2, 3, 4, 5]) == {"n": 5, "mean": 3, "p50": 3, "p90": 4.6}
