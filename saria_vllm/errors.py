"""The exceptions that callers may meet. Everything else that is raised is a bug of ours."""

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a drive that is full: it may have room later."""

NOT_THE_DRIVE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of this process or machine, which say nothing about a drive."""

_MISUSE = (
    errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG,
    errno.EINVAL,
)  # fmt: skip
"""Errors of a path that cannot be used as it is configured, whatever its drive does."""


def is_drive_fault(error: OSError) -> bool:
    """Whether a drive is full, read-only, gone or failing, and not its path misused."""
    return error.errno not in _MISUSE


class SariaError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(SariaError, ValueError):
    """A configuration value cannot be used. The message names key, value and what is accepted."""


class LayoutError(SariaError):
    """The engine's KV cache has a layout, group kind or parallelism that is not supported yet."""


class FormatError(SariaError):
    """Bytes on an SSD are not what `docs/format.md` says they should be."""


class StorageError(SariaError):
    """A drive or directory cannot be used; the SSD tier gets smaller or goes off."""


class DriveError(StorageError):
    """A drive is full, read-only, gone or failing: it can be left out, and may be of use later."""

    def __init__(self, message: str, path: str, full: bool) -> None:
        super().__init__(message)
        self.path = path
        """The ssd path."""
        self.full = full


class TraceError(SariaError):
    """A trace file is malformed. The message names file, line and what was expected."""
