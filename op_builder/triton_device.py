"""What Triton's kernels need to run here; Triton itself compiles and keeps them."""
from zipscape.errors import BuildError, describe


def device_type() -> str:
    """Where they run: "cuda", or "cpu" where Triton interprets them. Raises BuildError when Triton is not installed or there is no GPU."""
    import torch  # not at module level: builders of other kernels do without

    try:
        from triton import knobs
    except ImportError as error:
        raise BuildError(describe("Triton is not installed", got=str(error), todo="pip install triton")) from error
    if knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        raise BuildError(describe("Triton has no device", got="no CUDA device, and TRITON_INTERPRET is not set"))
    return "cuda"
