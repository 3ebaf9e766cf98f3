"""The files of the "log" settings: one JSON line per row, appended by one rank."""
import json
import logging

from zipscape.errors import ConfigError, describe


def check(path: str | None, what: str, where: str = "ds_config.json") -> None:
    """Raises ConfigError if the file cannot be appended to. what: sentence of the error. where the name was read."""
    if path is None:
        return
    try:
        open(path, "a").close()
    except OSError as error:
        raise ConfigError(describe(what, got=f"log = {path!r}: {error.strerror}", expected="a file that rank 0 can append to", where=where,
                                   todo="make its folder, or name another file")) from None


class RowFile:
    """Nothing but rows is lost where they cannot be written, on a full disk for instance: that is said once, and training goes on."""

    def __init__(self, path: str | None, log: logging.Logger):
        """path: None for no file."""
        self._path, self._log = path, log
        self._file = open(path, "a", buffering=1) if path is not None else None

    def write(self, row: dict) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(row) + "\n")
            except OSError as error:
                self._log.warning("%s", describe("The log cannot be written any more; training goes on without it", got=error.strerror,
                                                 where=self._path))
                self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:         # the rest of the row whose failure was said
                pass
