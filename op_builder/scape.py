"""The native libraries of SCAPE."""

from zipscape.op_builder.base import NativeLibrary

#: Neither flag changes a result: errno and floating-point traps are nobody's business here, and would forbid vector code.
SCAPE_CPU = NativeLibrary("scape_cpu", ["scape/cpu_ops.cpp"], flags=("-fno-math-errno", "-fno-trapping-math"))
SCAPE_CUDA = NativeLibrary("scape_cuda", ["scape/kernels.cu"], compiler="nvcc")
LIBRARIES = (SCAPE_CPU, SCAPE_CUDA)
