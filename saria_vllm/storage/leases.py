"""Who holds the lease of an engine directory, asked without taking it."""

from __future__ import annotations

import fcntl
import os

from saria_vllm.storage.directories import LEASE_NAME, open_regular


def is_leased(engine_fd: int) -> bool:
    """Whether a living engine holds the lease. Asking takes a shared lock for an instant: an engine that starts just
    then tries again.

    Raises:
        OSError: the lease cannot be opened, but for its being missing or no regular file: nobody can hold that.
    """
    try:
        fd = open_regular(LEASE_NAME, os.O_RDONLY, engine_fd)
    except PermissionError:
        raise
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def lease_holders(engine_fd: int, proc: str = "/proc") -> list[int]:
    """Process ids that the kernel names for a lease: none where it does not know them, as those of another container.

    Raises:
        OSError: the lease or the list of locks cannot be read.
    """
    status = os.stat(LEASE_NAME, dir_fd=engine_fd, follow_symlinks=False)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    with open(f"{proc}/locks", encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[5] == file and words[4].isdecimal():
                found.append(int(words[4]))
    return sorted({pid for pid in found if pid > 0})
