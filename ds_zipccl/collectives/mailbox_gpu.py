"""How a GPU puts a status word into a mailbox, behind what is queued before: two calls of the driver, nothing for the host to wait for."""
import ctypes
import mmap

import torch

from ds_zipccl.errors import CollectiveError
from zipscape.errors import describe

_REGISTER_FLAGS = 3             # for all contexts, with an address for the GPU
_NOT_READY = 600                # a CUresult
_TRIAL = 0x5EED, 0xBADCAB1E     # a word and a stamp


class GpuWriter:
    """Entries of 8 bytes: the word is copied first, then a stream memory operation, before which the driver puts a fence for the whole
    system, sets the stamp. Who reads the stamp has the word too. Raises CollectiveError, OSError or AttributeError where that cannot be."""

    def __init__(self, device: torch.device):
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        driver = ctypes.CDLL("libcuda.so.1")
        u64, size, pointer, u32 = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint32
        self._register, self._unregister = driver.cuMemHostRegister_v2, driver.cuMemHostUnregister
        self._address_for_gpu = driver.cuMemHostGetDevicePointer_v2
        self._copy, self._set, self._query = driver.cuMemcpyDtoHAsync_v2, driver.cuStreamWriteValue32_v2, driver.cuStreamQuery
        self._register.argtypes, self._unregister.argtypes = (pointer, size, u32), (pointer,)
        self._address_for_gpu.argtypes = ctypes.POINTER(u64), pointer, u32
        self._copy.argtypes, self._set.argtypes = (pointer, u64, size, pointer), (pointer, u64, u32, u32)
        self._query.argtypes = pointer,
        self._host, self._on_gpu, self._stream = 0, 0, None
        self.posting = None             # the stream of what was queued last to write an entry by itself

    def open(self, memory: mmap.mmap, trial: int) -> None:
        """Makes the memory known to the GPU, and tries entry ``trial`` out. Waits for that alone."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):             # also makes the device's context the current one
                word = torch.full((1,), _TRIAL[0], dtype=torch.int32, device="cuda")
            address, seen = ctypes.addressof(ctypes.c_char.from_buffer(memory)), ctypes.c_uint64()
            _check(self._register(address, len(memory), _REGISTER_FLAGS), "register shared memory")
            try:
                _check(self._address_for_gpu(ctypes.byref(seen), address, 0), "give registered memory an address")
                self._host, self._on_gpu = address, seen.value
                self.write(trial, _TRIAL[1], word.data_ptr(), stream.cuda_stream)
                stream.synchronize()
                found = int.from_bytes(memory[8 * trial:8 * trial + 8], "little")
                if found != _TRIAL[1] << 32 | _TRIAL[0]:
                    raise CollectiveError(describe("a GPU's words do not come through shared memory", got=hex(found)))
            except Exception:
                self._unregister(address)
                raise

    def write(self, entry: int, stamp: int, word: int, stream: int) -> None:
        """Queues the writing of an entry. ``word``: where the GPU has it, an address; ``stream``: a handle."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.write(entry, stamp, word, stream)
            return
        self._stream = stream
        code = self._copy(self._host + 8 * entry, word, 4, stream) or self._set(stream, self._on_gpu + 8 * entry + 4, stamp, 0)
        if code:
            _check(code, "write a status word")

    def address(self, entry: int, stream: int) -> int:
        """Of an entry, for a kernel that is queued on ``stream`` to write."""
        self.posting = stream
        return self._on_gpu + 8 * entry

    def raise_on_error(self) -> None:
        """RuntimeError: what has gone wrong on the GPU is not to be waited for."""
        with torch.cuda.device(self._device):
            codes = {self._query(stream) for stream in {self._stream, self.posting}} - {0, _NOT_READY}
        if codes:
            raise RuntimeError(describe("status words do not come from the GPU", got=f"CUresult {max(codes)}"))

    def close(self) -> bool:
        """Whether the GPU knows nothing of the memory any more; False where ``write`` may not have done so yet. Kernels must have."""
        with torch.cuda.device(self._device):
            return self._query(self._stream) == 0 and self._unregister(self._host) == 0


def _check(code: int, what: str) -> None:
    if code:
        raise CollectiveError(describe(f"CUDA refused to {what}", got=f"CUresult {code}"))
