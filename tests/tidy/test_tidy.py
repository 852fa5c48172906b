"""The rules of the house: who may import what, sizes, leftovers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "saria_vllm"
CONNECTOR = ROOT / "connector" / "saria_connector"
FOLDERS = ("saria_vllm", "connector", "tests", "e2e", "scripts", "csrc", "docs", ".ci")
CACHES = {"__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache"}
NOT_OURS = {"LICENSE", ".git", ".coverage"}
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80
STANDARD = sys.stdlib_module_names

IMPURE = {
    "asyncio", "concurrent", "ctypes", "fcntl", "glob", "io", "mmap", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "datetime",
}  # fmt: skip
LIBRARIES = {
    "policy": {"msgspec", "numpy", "saria_vllm"},
    "storage": {"msgspec", "numpy", "saria_vllm"},
    "sim": {"msgspec", "numpy", "saria_vllm"},
    "engine": {"msgspec", "numpy", "torch", "nixl", "kvikio", "saria_vllm"},
    "cli": {"msgspec", "aiohttp", "rich", "matplotlib", "tokenizers", "saria_vllm"},
    "": {"msgspec", "numpy", "saria_vllm"},
}
OWN_PARTS = {
    "policy": {"policy"},
    "storage": {"storage"},
    "sim": {"sim", "policy", "storage"},
    "engine": {"engine", "storage"},
    "cli": {"cli", "sim", "policy", "storage", "engine"},
    "": set(),
}
"""Parts of saria_vllm that a part may import, beside the modules at its root."""

BUILTIN_IO = {"open", "input", "print", "breakpoint", "exec", "eval"}


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files():
    kept = {".py", ".pyi", ".cpp", ".h", ".md", ".sh", ".toml", ".txt", ".json", ".svg", ""}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kept]
    files += [path for path in ROOT.iterdir() if path.suffix in kept and path.name not in NOT_OURS]
    return sorted(path for path in files if path.is_file() and not CACHES & set(path.parts))


def imports(path):
    """Every module that a file imports anywhere, in functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module, node.lineno))
            if node.module == "saria_vllm":
                found += [(f"saria_vllm.{alias.name}", node.lineno) for alias in node.names]
    return found


def part_of(path):
    return path.relative_to(LIBRARY).parts[0] if path.parent != LIBRARY else ""


@pytest.mark.parametrize("path", python_files("saria_vllm"), ids=lambda path: str(path.relative_to(ROOT)))
def test_import_table(path):
    part = part_of(path)
    parts = {entry.name for entry in LIBRARY.iterdir() if entry.is_dir()}
    for module, line in imports(path):
        top, _, rest = module.partition(".")
        where = f"{path}:{line}: {part or 'the root'} imports {module}"
        assert top in STANDARD | LIBRARIES[part], where
        if part == "policy":
            assert top not in IMPURE, where
        if top == "saria_vllm" and rest.split(".")[0] in parts:
            assert rest.split(".")[0] in OWN_PARTS[part], where


def test_policy_calls_no_io():
    for path in python_files("saria_vllm/policy"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in BUILTIN_IO, f"{path}:{node.lineno}: {node.func.id}()"


def test_only_the_connector_and_e2e_import_vllm():
    for path in python_files("saria_vllm", "scripts"):
        assert not [name for name, _ in imports(path) if name.split(".")[0] in ("vllm", "saria_connector")], path


def test_pure_parts_load_neither_torch_nor_vllm_and_are_quick():
    code = (
        "import time; began = time.process_time()\n"
        "import saria_vllm.policy, saria_vllm.sim, saria_vllm.sim.trace, saria_vllm.sim.workload\n"
        "import sys, pkgutil, importlib\n"
        "for module in pkgutil.iter_modules(saria_vllm.policy.__path__, 'saria_vllm.policy.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(time.process_time() - began, sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    best = 9.0
    for _ in range(3):
        seconds, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split(" ", 1)
        assert loaded.strip() == "[]"
        best = min(best, float(seconds))
    assert best < 0.5


def test_engine_runs_without_vllm():
    for path in python_files("saria_vllm/engine"):
        assert "vllm" not in {name.split(".")[0] for name, _ in imports(path)}, path


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX, f"{path}: over {FILE_LINES_MAX} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno}: {node.name} has {lines} lines"


def test_no_leftovers():
    markers = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    places = re.compile("|".join(("/work" + "/", "/tmp" + "/lab", "/ro" + "ot/", "/home" + "/")))
    for path in text_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not markers.search(line), f"{path}:{number}: leftover marker"
            assert not places.search(line), f"{path}:{number}: a path of one machine"
