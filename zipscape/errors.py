"""The error kinds both packages share, and the one shape of their messages."""
import difflib


class ZipScapeError(Exception):
    """Base of every error raised by ZipScape."""


class ConfigError(ZipScapeError, ValueError):
    """A section of ds_config.json is wrong: unknown key, wrong type, out of range, impossible combination."""


class HandshakeError(ZipScapeError, RuntimeError):
    """The ranks do not agree (missing, failed, or differing), found before the first collective."""


class BuildError(ZipScapeError, RuntimeError):
    """A native library could not be built or loaded; the message carries the compiler's own words."""


def describe(what, *, got=None, expected=None, where=None, todo=None) -> str:
    """One paragraph: what failed, got, expected, where, what to do. Parts that are None are left out.

    what, where, todo: text. got, expected: text is shown as it is, anything else by repr().
    """
    parts = [_sentence(what)]
    for name, value in (("Got", got), ("Expected", expected), ("Where", where)):
        if value is not None:
            parts.append(_sentence(f"{name}: {_text(value)}"))
    if todo is not None:
        parts.append(f"What to do: {_sentence(todo)}")
    return " ".join(parts)


def unknown_field(path: str, known) -> str:
    """What is wrong with a key that nobody knows. path: with the keys above it, by dots. known: the names that are right there."""
    text = f"{path}: unknown field (known: {', '.join(known)})"
    close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    return f"{text}, did you mean {close[0]}?" if close else text


def _text(value) -> str:
    return value if isinstance(value, str) else repr(value)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."
