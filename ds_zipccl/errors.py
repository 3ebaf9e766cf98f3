"""The error kinds of ds_zipccl. Few, each with one meaning; configuration errors are zipscape.errors.ConfigError."""
from zipscape.errors import ZipScapeError


class FrameError(ZipScapeError, ValueError):
    """A frame is corrupt, truncated, overflowed, or of another format version, dtype or size than expected."""


class KernelError(ZipScapeError, RuntimeError):
    """A kernel set that was asked for by name does not exist, cannot be built, or does not serve this device."""


class CollectiveError(ZipScapeError, RuntimeError):
    """A collective cannot be carried out as called (ranks disagree, or a transport failed)."""
