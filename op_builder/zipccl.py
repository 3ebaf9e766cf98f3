"""The native libraries of ZipCCL."""

from zipscape.op_builder.base import NativeLibrary

ZIPCCL_CPU = NativeLibrary("zipccl_cpu", ["zipccl/cpu_codec.cpp"])
ZIPCCL_CUDA = NativeLibrary("zipccl_cuda", ["zipccl/codec.cu"], compiler="nvcc")
ZIPCCL_SYMMETRIC = NativeLibrary("zipccl_symmetric", ["zipccl/symmetric.cu"], compiler="nvcc")
LIBRARIES = (ZIPCCL_CPU, ZIPCCL_CUDA, ZIPCCL_SYMMETRIC)
