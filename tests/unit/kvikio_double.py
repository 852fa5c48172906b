"""A double of what we use of KvikIO 26.10, for memory of the host. Where a GPU is, e2e/gpu has the real one."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class KvikioDouble:
    """In the place of the module `kvikio`."""

    open_files: int = 0
    closed_in_flight: int = 0
    tasks: list[tuple[int, int]] = field(default_factory=list)
    """Bytes and task size of each transfer."""
    registered: list[int] = field(default_factory=list)
    """Addresses."""
    refuses_memory: bool = False
    short_is_told: bool = False
    """A read that meets the end of the file tells how much it read, as GDS does; else it raises, as without GDS."""
    modes: list[str] = field(default_factory=list)
    """In which files were opened."""

    def CuFile(self, path: str, flags: str) -> File:
        return File(self, path, flags)

    def memory_register(self, memory: Any) -> None:
        if self.refuses_memory:
            raise RuntimeError("CUDA error")
        self.registered.append(memory.__cuda_array_interface__["data"][0])

    def memory_deregister(self, memory: Any) -> None:
        self.registered.remove(memory.__cuda_array_interface__["data"][0])


class File:
    """Opens by path, as KvikIO does; an error of the system is a RuntimeError."""

    def __init__(self, double: KvikioDouble, path: str, flags: str) -> None:
        assert flags in ("r", "r+")  # "w" would truncate, "a" is refused.
        self._double, self.in_flight, self.closed = double, 0, False
        try:
            self.fd = os.open(path, (os.O_RDWR if flags == "r+" else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"Unable to open file. {error}") from None
        double.open_files += 1
        double.modes.append(flags)

    def pread(self, memory: Any, size: int, file_offset: int, task_size: int) -> Future:
        return Future(self, False, memory, size, file_offset, task_size)

    def pwrite(self, memory: Any, size: int, file_offset: int, task_size: int) -> Future:
        return Future(self, True, memory, size, file_offset, task_size)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self._double.open_files -= 1
        self._double.closed_in_flight += bool(self.in_flight)
        os.close(self.fd)


class Future:
    """Tells its end once: afterwards `get` and `done` raise."""

    def __init__(self, file: File, write: bool, memory: Any, size: int, offset: int, task_size: int) -> None:
        interface = memory.__cuda_array_interface__
        assert interface["typestr"] == "|u1" and interface["shape"] == (size,) and interface["strides"] is None
        self._double, self._file, self._told = file._double, file, False
        self._result: int | RuntimeError = 0
        self._double.tasks.append((size, task_size))
        file.in_flight += 1
        self._thread = threading.Thread(target=self._run, args=(write, interface["data"][0], size, offset), daemon=True)
        self._thread.start()

    def done(self) -> bool:
        if self._told:
            raise ValueError("The future object does not refer to a valid shared state.")
        return not self._thread.is_alive()

    def get(self) -> int:
        if self._told:
            raise RuntimeError("std::future_error: No associated state")
        self._thread.join()
        self._told = True
        if isinstance(self._result, RuntimeError):
            raise self._result
        return self._result

    def _run(self, write: bool, addr: int, size: int, offset: int) -> None:
        memory = memoryview((ctypes.c_char * size).from_address(addr))
        done = 0
        try:
            while done < size:
                rest = memory[done:]
                moved = (
                    os.pwritev(self._file.fd, [rest], offset + done)
                    if write
                    else _read(self._file.fd, rest, offset + done)
                )
                if moved == 0 and self._double.short_is_told:
                    break
                if moved == 0:
                    raise RuntimeError("POSIX error on pread: EOF")
                done += moved
            self._result = done
        except OSError as error:
            self._result = RuntimeError(f"POSIX error: {error}")
        except RuntimeError as error:
            self._result = error
        self._file.in_flight -= 1


def _read(fd: int, memory: memoryview, offset: int) -> int:
    try:
        return os.preadv(fd, [memory], offset)
    except OSError as error:
        if error.errno != errno.ESPIPE:
            raise
    return os.readv(fd, [memory])
