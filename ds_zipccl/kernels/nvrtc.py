"""The CUDA kernels without a CUDA toolkit: the same source through NVRTC (a library that comes with torch) and the driver's own API.

``NvrtcCalls`` has the methods of ``cuda_calls.CudaCalls`` but allow_overlap: launches have no attributes here, so kernels do not overlap.
Calls cost the host a few microseconds more.
"""
import ctypes
import functools
import re
import struct
from pathlib import Path

import torch

from ds_zipccl.errors import KernelError
from ds_zipccl.kernels.cuda_calls import packed_geometry
from zipscape.errors import BuildError, describe

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_DTYPE_NAMES = {1: "bf16", 2: "fp16", 3: "fp32"}
_FLAGS = ("--std=c++17", "-fmad=false", "-default-device")
_WARPS = {"encode": 16, "decode": 4, "reduce": 4, "reduce2": 4}          # as in codec.cu
_REDUCE_ROWS_WARPS = 1                                                    # of "reduce" at level 1, item size 2
_TILE_BLOCKS = 32
_ENCODE_LEVEL2 = 8, 8 * 2048 + 32 * 1792                                  # warps, bytes of shared memory: EncodeLevel2 in encode.cuh
_BLOCK_STAGE = {2: 32 * 48, 4: 32 * 80}      # bytes of shared memory that encode needs for a block, by item size
_MAX_DYNAMIC_SHARED = 8                      # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _warps_of(operation: str, g) -> int:
    return _REDUCE_ROWS_WARPS if operation == "reduce" and g.level == 1 and g.itemsize == 2 else _WARPS[operation]


def _find_nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "13").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    packages = Path(torch.__file__).parent.parent / "nvidia"
    names += sorted(map(str, packages.glob(f"**/libnvrtc.so.{major}")))
    for name in names:
        try:
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(str(builtins))               # NVRTC opens it by its bare name, and looks in no folder of ours
            return ctypes.CDLL(name)
        except OSError:
            pass
    raise BuildError(describe("NVRTC was not found", got=", ".join(names), todo="install nvcc, or the wheel nvidia-cuda-nvrtc"))


def _sources(path: Path) -> dict[str, str]:
    """Everything ``path`` includes with quotes, by the name it is included with."""
    found: dict[str, str] = {}
    todo = [path]
    while todo:
        source = todo.pop()
        for name in _INCLUDE.findall(source.read_text()):
            header = source.parent / name
            if name not in found and header.is_file():
                found[name] = header.read_text()
                todo.append(header)
    return found


def compile_cubin(path: Path, arch: str) -> bytes:
    """The source compiled for ``arch`` (as "sm_90"). Raises BuildError with the compiler's own words."""
    nvrtc = _find_nvrtc()
    headers = _sources(path)
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    options = [f"--gpu-architecture={arch}".encode(), *(flag.encode() for flag in _FLAGS)]
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), len(headers), texts, names)
    if code == 0:
        code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if code:
        raise BuildError(describe("NVRTC could not compile the CUDA kernels", got=_output(nvrtc, program, "ProgramLog").decode(),
                                  where=str(path)))
    return _output(nvrtc, program, "CUBIN")


def _output(nvrtc, program, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


@functools.cache
def _num_multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class NvrtcCalls:
    """The kernels of ``source``, compiled for each device at its first use. Raises BuildError, later KernelError."""

    def __init__(self, source: Path):
        self._source = source
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._module()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise KernelError(describe(f"the CUDA driver refused {what}", got=f"CUresult {code}"))

    def _module(self) -> ctypes.c_void_p:
        device = torch.cuda.current_device()
        if device not in self._modules:
            torch.cuda.current_stream().synchronize()              # torch's context is then there and current
            major, minor = torch.cuda.get_device_capability(device)
            cubin = compile_cubin(self._source, f"sm_{major}{minor}")
            module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin), "the module")
            self._modules[device] = module
        return self._modules[device]

    def _launch(self, operation: str, g, num_ctas: int, num_rows: int, stream: int, *fields: int) -> None:
        if not (num_ctas and num_rows):
            return
        warps, shared = _warps_of(operation, g), _TILE_BLOCKS * _BLOCK_STAGE[g.itemsize] if operation == "encode" else 0
        if g.level == 2 and operation == "encode":
            warps, shared = _ENCODE_LEVEL2
        name = f"zipccl_{operation}_{_DTYPE_NAMES[g.dtype_code]}{'_level2' if g.level == 2 else ''}"
        key = torch.cuda.current_device(), name
        function = self._functions.get(key)
        if function is None:
            function = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module(), key[1].encode()), key[1])
            if shared:
                self._check(self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), "shared memory")
            self._functions[key] = function
        fields += (_num_multiprocessors(key[0]), 0, 0)
        call = ctypes.create_string_buffer(packed_geometry(g) + struct.pack(f"<{len(fields)}q", *fields))      # struct Call
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        self._check(self._driver.cuLaunchKernel(function, num_ctas, num_rows, 1, 32 * warps, 1, 1, shared,
                                                ctypes.c_void_p(stream), arguments, None), f"to launch {key[1]}")

    def prepare(self) -> tuple[int, int, int]:
        """See CudaCalls."""
        found = []
        for name, item in ((b"zipccl_workspaces", 8), (b"zipccl_errors", 4)):
            address, size = ctypes.c_uint64(), ctypes.c_size_t()
            self._check(self._driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module(), name), "a global")
            found += address.value, size.value // item
        return found[0], found[1], found[2]

    def take_word(self, address: int, stream: int) -> int:
        """See CudaCalls."""
        word = ctypes.c_uint32()
        where, stream = ctypes.c_uint64(address), ctypes.c_void_p(stream)
        self._check(self._driver.cuMemcpyDtoHAsync_v2(ctypes.byref(word), where, ctypes.c_size_t(4), stream), "a copy")
        self._check(self._driver.cuMemsetD32Async(where, 0, ctypes.c_size_t(1), stream), "a memset")
        self._check(self._driver.cuStreamSynchronize(stream), "to synchronize")
        return word.value

    def encode(self, g, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, stream) -> None:
        self._launch("encode", g, g.num_tiles + 1, num_rows - (skip >= 0), stream,
                     x, frames, 0, row_stride, frame_stride, num_rows, skip, status, workspace)

    def decode(self, g, frames, frame_stride, out, row_stride, num_rows, skip, errors, stream) -> None:
        self._launch("decode", g, max(g.num_tiles * (_TILE_BLOCKS // _WARPS["decode"]), 1), num_rows - (skip >= 0), stream,
                     0, frames, out, row_stride, frame_stride, num_rows, skip, errors, 0)

    def decode_reduce(self, g, frames, frame_stride, num_rows, own, own_index, out, errors, stream) -> None:
        operation = "reduce2" if num_rows == 2 else "reduce"
        self._launch(operation, g, g.num_tiles * (_TILE_BLOCKS // _warps_of(operation, g)), 1, stream,
                     own, frames, out, 0, frame_stride, num_rows, own_index, errors, 0)

    # See CudaCalls; here nothing is gained by it.

    def bind_encode(self, g, row_stride, frames, frame_stride, num_rows, skip, status):
        return lambda x, workspace, stream: self.encode(g, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, stream)

    def bind_decode(self, g, frames, frame_stride, row_stride, num_rows, skip, errors):
        return lambda out, stream: self.decode(g, frames, frame_stride, out, row_stride, num_rows, skip, errors, stream)

    def bind_decode_reduce(self, g, frames, frame_stride, num_rows, own_index, errors):
        return lambda own, out, stream: self.decode_reduce(g, frames, frame_stride, num_rows, own, own_index, out, errors, stream)
