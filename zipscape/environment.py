"""Environment variables that hold a number, and our switches: read here alone.

Most are read while a module is imported, where an error would be noted and no more (activate.py). So what cannot be read counts there as if
it were not set, and ``check`` tells of it where ranks agree on their settings, before any of it is used.
"""
import os
from typing import NamedTuple

from zipscape.errors import ConfigError, describe


class Number(NamedTuple):
    """An integer from ``least`` on."""
    default: int
    least: int
    is_for_tests: bool = False          # then no user is told of it


#: Documented in docs/config.md, as are the switches.
NUMBERS = {
    "ZIPCCL_LATE": Number(0, 0),                                        # buckets
    "ZIPCCL_MAILBOX_LAG": Number(20, 1, is_for_tests=True),             # calls; more than may be in flight (group_state): nobody waits
    "ZIPCCL_SYMMETRIC_BYTES": Number(1 << 30, 1, is_for_tests=True),
}
SWITCHES = ("ZIPCCL_MAILBOX", "ZIPCCL_PREPARED", "ZIPCCL_AGAIN", "ZIPCCL_DIRECT")
_WHAT_TO_DO = "unset it, or set it as docs/config.md says"


def number(name: str) -> int:
    """A key of NUMBERS; its default also where ``check`` raises."""
    known = NUMBERS[name]
    try:
        return integer(name, known.default, known.least)
    except ConfigError:
        return known.default


def is_on(name: str) -> bool:
    """One of SWITCHES: on unless it is 0."""
    return _text(name) != "0"


def check() -> None:
    """Raises ConfigError for the first variable that is not what it may be."""
    for name, known in NUMBERS.items():
        integer(name, known.default, known.least)
    for name in SWITCHES:
        if _text(name) not in ("", "0", "1"):
            raise ConfigError(describe(f"the environment variable {name} is no switch", got=_text(name), expected="0 (off) or 1 (on)",
                                       todo=_WHAT_TO_DO))


def integer(name: str, default: int | None = None, least: int = 0, todo: str = _WHAT_TO_DO) -> int:
    """The variable's value, unset or empty ``default`` (None: it must be set). Raises ConfigError for anything but an integer from
    ``least`` on; ``todo``: what that says to do."""
    text = _text(name)
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise ConfigError(describe(f"the environment variable {name} is not what it may be", got=text or "nothing",
                                   expected=f"an integer >= {least}", todo=todo))
    return value


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()
