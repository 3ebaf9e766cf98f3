"""Errors of SCAPE beyond those of zipscape.errors."""
from zipscape.errors import ZipScapeError


class KernelError(ZipScapeError, RuntimeError):
    """A kernel set is unknown, cannot be built, or cannot take what it was given."""
