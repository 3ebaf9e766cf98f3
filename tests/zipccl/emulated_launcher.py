"""What prepared calls need of a kernel set (kernels/ops.py, ``launcher``), with the emulated CUDA kernels: on a CPU."""
import ctypes
from types import SimpleNamespace

import torch

from ds_zipccl.kernels.cuda_calls import CudaCalls
from ds_zipccl.kernels.launch_calls import LaunchCalls

NUM_DRIVER_FUNCTIONS, COPY = 5, 2


def launcher_of(codec: CudaCalls) -> SimpleNamespace:
    library, words = codec.library, torch.zeros(1 << 12, dtype=torch.int64)
    functions = [getattr(library, f"zipccl_cuda_{name}") for name in ("encode_telling", "decode", "decode_reduce")]
    driver = [functions[0]] * NUM_DRIVER_FUNCTIONS                      # of these one alone is called
    driver[COPY] = _copy
    return SimpleNamespace(launch_calls=LaunchCalls(library, *functions, *driver), prints=codec.prints, keep=words,
                           workspace=lambda index, stream, num_words: words.data_ptr(),
                           error_word=lambda index: words[-1:].data_ptr(), errors=words[-1:])


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
def _copy(to, source, num_bytes, _stream):
    ctypes.memmove(to, source, num_bytes)
    return 0
