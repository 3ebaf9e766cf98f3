"""The fixture of the codec's tests: every kernel set that serves the CPU, by name; those of a GPU that is not there; and short-lived groups
get their mailbox at once."""
import os

import pytest

from ds_zipccl.kernels import loader, ops
from tests.zipccl.stream_fixtures import gpu, library, live  # noqa: F401
from tests.zipccl.symmetric_ranks import libraries  # noqa: F401

os.environ.setdefault("ZIPCCL_MAILBOX_LAG", "1")        # read by the processes of ranks


@pytest.fixture(params=[name for name, device_types, _ in loader.PREFERENCE if "cpu" in device_types])
def kernels(request) -> str:
    """A set that cannot be built here, or that does not know the test's ``level``, is skipped with its reason."""
    reason = loader.load(request.param)
    if reason is not None:
        pytest.skip(f"kernels {request.param!r}: {reason}")
    level = getattr(request.node, "callspec", request).params.get("level", 1)
    if level not in ops.kernel_set(request.param).levels:
        pytest.skip(f"kernels {request.param!r} do not know level {level}")
    return request.param
