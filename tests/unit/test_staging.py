"""Staging memory: where its buffers lie, and what the kernel was told of it."""

from __future__ import annotations

import ctypes
import re

import pytest

from saria_vllm.engine.posix import PosixEngine
from saria_vllm.engine.staging import Staging


class Engine(PosixEngine):
    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        self.registered = addr, nbytes, device
        return True


def flags_at(address: int) -> set[str]:
    """VmFlags of the mapping that holds an address."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(match[1], 16) <= address < int(match[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("buffer_bytes", [4096, 12_288, 3 << 20])
def test_buffers_follow_each_other_and_all_of_them_are_registered(buffer_bytes: int) -> None:
    engine = Engine(5)
    staging = Staging(engine, buffer_bytes)
    addresses = [staging.address(buffer) for buffer in range(5)]
    assert addresses[0] % 4096 == 0
    assert addresses == [addresses[0] + buffer_bytes * buffer for buffer in range(5)]
    assert staging.registered and engine.registered == (addresses[0], 5 * buffer_bytes, -1)
    for buffer, address in enumerate(addresses):
        ctypes.memset(address, buffer + 1, buffer_bytes)
    ends = [ctypes.string_at(address + end, 1) for address in addresses for end in (0, buffer_bytes - 1)]
    assert ends == [bytes([buffer + 1]) for buffer in range(5) for _ in range(2)]
    engine.close()


def test_the_kernel_is_asked_for_huge_pages_that_no_fork_copies() -> None:
    engine = PosixEngine(4)
    staging = Staging(engine, 1 << 20)
    assert not staging.registered
    assert {"hg", "dc"} <= flags_at(staging.address(3))
    engine.close()
