"""What Triton's kernels need to run here; Triton itself compiles and keeps them."""
import functools

from zipscape.errors import BuildError, describe


@functools.cache
def device_type() -> str:
    """Where they run: "cuda", or "cpu" where Triton interprets them. Raises BuildError when Triton is not installed, there is no GPU, or it
    cannot build: it needs a C compiler at run time. Better here than in the first step."""
    import torch  # not at module level: builders of other kernels do without

    try:
        import triton
    except ImportError as error:
        raise BuildError(describe("Triton is not installed", got=str(error), todo="pip install triton")) from error
    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        raise BuildError(describe("Triton has no device", got="no CUDA device, and TRITON_INTERPRET is not set"))
    try_one(triton)
    return "cuda"


def try_one(triton) -> None:
    """Builds and launches a kernel that does nothing."""
    @triton.jit
    def nothing():
        pass

    try:
        nothing[(1,)]()
    except Exception as error:              # Triton's, the compiler's, the driver's
        raise BuildError(describe("Triton cannot build its kernels", got=f"{type(error).__name__}: {error}",
                                  todo="install a C compiler and Python's headers, or nvcc")) from error
