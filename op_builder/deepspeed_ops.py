"""Our libraries as DeepSpeed ops, so that ds_report lists them. A seam: one of the few files that import deepspeed."""

import sys

from deepspeed.ops.op_builder.builder import OpBuilder

from zipscape.op_builder import scape, zipccl


class NativeOpBuilder(OpBuilder):
    """An op whose load() compiles without torch headers and returns a ctypes handle, not a Python module."""

    NAME = None
    BUILD_VAR = None
    LIBRARY = None

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"zipscape.op_builder.{self.NAME}"

    def sources(self):
        return [str(path) for path in self.LIBRARY.source_paths()]

    def include_paths(self):
        return [str(self.LIBRARY.csrc)]

    def is_compatible(self, verbose=False):
        available, reason = self.LIBRARY.available()
        if not available and verbose:
            self.warning(reason)
        return available

    def jit_load(self, verbose=True):
        return self.LIBRARY.load()


class ZipcclCPUBuilder(NativeOpBuilder):
    NAME = "zipccl_cpu"
    BUILD_VAR = "DS_BUILD_ZIPCCL_CPU"
    LIBRARY = zipccl.ZIPCCL_CPU


class ZipcclCUDABuilder(NativeOpBuilder):
    NAME = "zipccl_cuda"
    BUILD_VAR = "DS_BUILD_ZIPCCL_CUDA"
    LIBRARY = zipccl.ZIPCCL_CUDA


class ScapeCPUBuilder(NativeOpBuilder):
    NAME = "scape_cpu"
    BUILD_VAR = "DS_BUILD_SCAPE_CPU"
    LIBRARY = scape.SCAPE_CPU


class ScapeCUDABuilder(NativeOpBuilder):
    NAME = "scape_cuda"
    BUILD_VAR = "DS_BUILD_SCAPE_CUDA"
    LIBRARY = scape.SCAPE_CUDA


BUILDERS = (ZipcclCPUBuilder, ZipcclCUDABuilder, ScapeCPUBuilder, ScapeCUDABuilder)


def register(all_ops) -> None:
    """Add our builders to DeepSpeed's table. all_ops: the module deepspeed.ops.op_builder.all_ops."""
    for builder in BUILDERS:
        all_ops.ALL_OPS[builder.NAME] = builder()
    # DeepSpeed fills __compatible_ops__ from that table at its first use; only if that is past it needs our rows.
    compatible = vars(sys.modules.get("deepspeed.ops", all_ops)).get("__compatible_ops__")
    if compatible is not None:
        compatible.update({builder.NAME: builder().is_compatible() for builder in BUILDERS})
