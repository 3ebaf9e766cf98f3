"""Files of rows: refused before training where they cannot be written, given up in the middle of it."""
import json
import logging
import os
import re

import pytest

from zipscape import row_file
from zipscape.errors import ConfigError

LOG = logging.getLogger("test_row_file")


def test_rows_are_appended(tmp_path):
    path = tmp_path / "log.jsonl"
    for first in (1, 3):
        file = row_file.RowFile(str(path), LOG)
        file.write({"step": first})
        file.write({"step": first + 1})
        file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_no_file_takes_every_row():
    file = row_file.RowFile(None, LOG)
    file.write({"step": 1})
    file.close()


@pytest.mark.parametrize("name, words", [("nowhere/log.jsonl", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_is_refused(tmp_path, name, words):
    path = os.path.join(tmp_path, name)
    with pytest.raises(ConfigError, match=f"It is wrong. Got: log = {re.escape(repr(path))}: {words}.*What to do: make its folder"):
        row_file.check(path, "It is wrong")
    row_file.check(os.path.join(tmp_path, "log.jsonl"), "fine")
    row_file.check(None, "fine")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_is_said_once_and_ends_nothing(caplog):
    file = row_file.RowFile("/dev/full", LOG)
    for step in range(3):
        file.write({"step": step})
    file.close()
    message, = (record.getMessage() for record in caplog.records)
    assert message == "The log cannot be written any more; training goes on without it. Got: No space left on device. Where: /dev/full."
