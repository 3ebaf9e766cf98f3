"""The error kinds both packages share, and the one shape of their messages."""


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


def _text(value) -> str:
    return value if isinstance(value, str) else repr(value)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."
