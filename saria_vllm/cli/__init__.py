"""The `saria` command. Each subcommand is a module with `add_arguments` and `run`, imported only when it is called.

Exit status: 0 fine, 1 a problem was found, 2 bad usage. Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import saria_vllm
from saria_vllm.errors import SariaError, StorageError

COMMANDS = {
    "bench": "measure a part of the tier on this machine",
    "doctor": "check this machine, SSD paths and a configuration: ok, warn or bad, and what to do",
    "fsck": "check every file and every byte under an SSD path, and drop what is bad",
    "inspect": "show what lies under an SSD path: namespaces, engines, last use, wear; drop old namespaces",
    "plan": "sweep DRAM, SSD, drives and admission over a trace: what to buy, and the configuration to serve with",
    "replay": "drive a vLLM server with real agent sessions and measure each turn",
    "simulate": "replay a trace through the policy that the connector runs: hits, SSD writes, time",
}


class UsageError(SariaError):
    """The command line asks for something impossible. The message says what is accepted."""


def not_an_ssd_path(path: str, error: OSError | StorageError) -> UsageError:
    """What to say of a directory that was given as one of `ssd_paths`."""
    if isinstance(error, FileNotFoundError):
        found = f"{path}: there is no {os.path.join(path, 'saria')}"
        return UsageError(f"{found}; accepted: one of ssd_paths, which an engine has used")
    return UsageError(f"{path}: {getattr(error, 'strerror', None) or error}; accepted: one of ssd_paths")


def printable(text: str) -> str:
    """Lines for a terminal. Paths and what the system says are others' to choose: nothing in them may steer it, or be
    refused by its encoding."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without all the options in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="saria", description=saria_vllm.__doc__)
    parser.add_argument("--version", action="version", version=f"saria-vllm {saria_vllm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in words:
            module = importlib.import_module(f"saria_vllm.cli.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
    arguments = parser.parse_args(words)
    module = importlib.import_module(f"saria_vllm.cli.{arguments.command}")
    try:
        status: int = module.run(arguments)
        sys.stdout.flush()
    except SariaError as error:
        print(f"saria {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has seen enough. What is left of it must not fail at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status
