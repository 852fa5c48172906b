"""The entry point by which vLLM knows the connector by its name: loaded again and again, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parent.parent
GROUP = "vllm.general_plugins"

LOAD = """
import json, multiprocessing, sys

def load_often():
    import vllm.plugins
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    seen = []
    for _ in range(3):
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        seen.append(KVConnectorFactory._registry.get("SariaConnector"))
    cheap = "saria_connector.connector" not in sys.modules
    from vllm.config import KVTransferConfig
    named = {"kv_connector": "SariaConnector", "kv_role": "kv_both"}
    by_name = KVConnectorFactory.get_connector_class(KVTransferConfig(**named))
    named["kv_connector_module_path"] = "saria_connector"
    by_path = KVConnectorFactory.get_connector_class(KVTransferConfig(**named))
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    same = len({id(one) for one in [*seen, KVConnectorFactory._registry["SariaConnector"]]}) == 1
    return [seen[0] is not None and same, cheap, by_name is by_path, by_name.__name__]

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as forked:
        child = forked.apply(load_often)
    here = load_often()
    with multiprocessing.get_context("fork").Pool(1) as forked:
        print(json.dumps([child, here, forked.apply(load_often)]))
"""
"""In a child, here, and in a child that inherits what was loaded."""


def test_the_plugin_may_be_loaded_many_times_in_every_process(tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    info = tmp_path / "saria_vllm-0.dist-info"  # As if installed.
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saria-vllm\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in declared.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = [str(tmp_path), str(ROOT), str(ROOT / "connector"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    child, here, inherited = json.loads(done.stdout.splitlines()[-1])
    assert child == here == [True, True, True, "SariaConnector"]
    assert inherited == [True, False, True, "SariaConnector"]
