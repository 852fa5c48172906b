"""The exceptions that callers may meet. Everything else that is raised is a bug of ours."""


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


class TraceError(SariaError):
    """A trace file is malformed. The message names file, line and what was expected."""
