"""The test server itself: a server that dies says why, and nothing of it is left."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from server import Server, ServerDied

HERE = Path(__file__).parent
SLEEP = "import time; time.sleep(99)"
SILENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SILENT}"
SHARED = (
    "import multiprocessing; from multiprocessing import shared_memory, resource_tracker; import http.server, sys\n"
    "memory = shared_memory.SharedMemory(create=True, size=4096)\n"
    "resource_tracker.unregister(memory._name, 'shared_memory')\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "print(memory.name, 'sem.' + lock._semlock.name[1:], flush=True)\n"
    "class Ok(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(500 if self.path == '/error' else 200)\n"
    "        self.send_header('Content-Length', '0' if self.path == '/health' else '100')\n"
    "        self.end_headers()\n"
    "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
    "http.server.HTTPServer(('127.0.0.1', port), Ok).serve_forever()\n"
)


def running(pid):
    """Whether a process is there and no zombie (in a container nobody may reap orphans)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path):
    code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    server = Server("model", log=tmp_path / "s.log", launcher=("-c", code))
    with pytest.raises(ServerDied, match=r"status 3\n[^$]*line 60\n[^$]*line 99") as caught:
        server.start()
    assert "line 59\n" not in str(caught.value)
    assert server.pids() == []


@pytest.mark.parametrize("code", [SILENT, STUBBORN], ids=["silent", "stubborn"])
def test_a_server_that_never_answers_is_ended_with_its_children(tmp_path, monkeypatch, code):
    monkeypatch.setattr("server.STOP_S", 1.0)
    server = Server("model", log=tmp_path / "s.log", launcher=("-c", code), ready_s=1.5)
    seen: list[list[int]] = []
    monkeypatch.setattr(server, "log_tail", lambda: seen.append(server.pids()))
    with pytest.raises(ServerDied, match="not ready after"):
        server.start()
    assert len(seen[0]) == 2
    assert not any(running(pid) for pid in seen[0])


def test_shared_memory_and_semaphores_of_a_killed_server_are_removed_and_no_others(tmp_path):
    own = multiprocessing.get_context("spawn").Lock()
    with Server("model", log=tmp_path / "s.log", launcher=("-c", SHARED)) as server:
        files = [Path("/dev/shm", name) for name in (tmp_path / "s.log").read_text().split()[:2]]
        assert all(path.exists() for path in files)
        server.kill()
        assert not any(path.exists() for path in files)
    assert Path("/dev/shm", f"sem.{own._semlock.name[1:]}").exists()


@pytest.mark.parametrize("path", ["/", "/error"])
def test_an_answer_that_breaks_off_is_a_dead_server(tmp_path, path):
    with (
        Server("model", log=tmp_path / "s.log", launcher=("-c", SHARED)) as server,
        pytest.raises(ServerDied, match="IncompleteRead"),
    ):
        server.request(path)


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job ignores it.\n"
        "from pathlib import Path; from server import Server\n"
        f"with Server('m', log=Path({str(tmp_path / 's.log')!r}), launcher=('-c', {SHARED!r})) as server:\n"
        "    print(server.pids()[0], flush=True); import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert not running(int(done.stdout))
