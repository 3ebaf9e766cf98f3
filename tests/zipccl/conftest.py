"""The fixture of the codec's tests: every kernel set that serves the CPU, by name."""
import pytest

from ds_zipccl.kernels import loader


@pytest.fixture(params=[name for name, device_types, _ in loader.PREFERENCE if "cpu" in device_types])
def kernels(request) -> str:
    """A set that cannot be built here is skipped with its reason."""
    reason = loader.load(request.param)
    if reason is not None:
        pytest.skip(f"kernels {request.param!r}: {reason}")
    return request.param
