"""Checkpoints of SCAPE under ZeRO 1 and 2."""
import os
from unittest import mock

import pytest

from tests.helpers.ranks import assert_ok, case_names

MODULE = "tests.scape.checkpoint_cases"
ANOTHER = "case_universal_at_another_world_size"
CASES = tuple(name for name in case_names(MODULE) if name not in (ANOTHER, "case_universal_checkpoint"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)


def test_universal_checkpoint_at_the_same_and_at_other_world_sizes(tmp_path):
    with mock.patch.dict(os.environ, SCAPE_TEST_FOLDER=str(tmp_path)):
        assert_ok(MODULE, ("case_universal_checkpoint",), 2, "case_universal_checkpoint")
        for world_size in (1, 3):
            assert_ok(MODULE, (ANOTHER,), world_size, ANOTHER)
