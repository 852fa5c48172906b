"""Measure a part of the tier on this machine."""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "reload": "reloads from DRAM and SSD together, in simulated time: promotion, overlap and pacing",
    "ssd": "read and write rates of a drive through the SSD engines that serve, and what they cost in CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    benches = parser.add_subparsers(dest="bench", metavar="what", required=True)
    for name, summary in BENCHES.items():
        module = importlib.import_module(f"saria_vllm.cli.bench_{name}")
        bench = benches.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(bench)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    status: int = importlib.import_module(f"saria_vllm.cli.bench_{arguments.bench}").run(arguments)
    return status
