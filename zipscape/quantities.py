"""Numbers as people write them on a command line."""
import math
import re

from zipscape.errors import ConfigError, describe

UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_count(text: str, name: str = "--params") -> int:
    """"350M" -> 350000000. Raises ConfigError, which calls the number ``name``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", text.strip().upper())
    count = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 1 <= count <= 1e15:
        raise ConfigError(describe(name, got=text, expected="a number from 1 to 1e15, or one with K, M, B or T: 350M, 1.8B"))
    return count


def check_above_zero(args, *names: str) -> None:
    """ConfigError for the first attribute of ``args`` among ``names`` that is neither None nor a finite number above 0."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(describe(f"--{name.replace('_', '-')}", got=value, expected="a number above 0"))


def check_share(args, name: str) -> None:
    """ConfigError if the attribute is not a number from 0 to 1."""
    if not 0 <= getattr(args, name) <= 1:
        raise ConfigError(describe(f"--{name.replace('_', '-')}", got=getattr(args, name), expected="a number from 0 to 1"))
