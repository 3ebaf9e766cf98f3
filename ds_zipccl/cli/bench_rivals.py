"""Other lossless compressors of tensors, measured the same way where they are installed: in host memory, and one on a GPU."""
import importlib.metadata

import torch

from ds_zipccl.cli.bench_nvcomp import NvcompAns


class Rival:
    """One compressor in host memory: ``compress`` makes an object with a length from bytes, ``decompress`` gives the bytes back."""
    device = "cpu"
    package = ""

    @classmethod
    def version(cls) -> str | None:
        """None when it is not installed."""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @classmethod
    def absent(cls) -> str | None:
        """Why it cannot be measured here."""
        return None if cls.version() else f"not installed (pip install {cls.package})"

    @staticmethod
    def refuses(dtype: torch.dtype) -> str | None:
        """Why tensors of ``dtype`` are not measured."""
        return None

    def fresh(self, data: bytes):
        """What ``compress`` takes; made anew, and not timed, for every call."""
        return data


class ZipNN(Rival):
    """Byte mode, Huffman on the exponents. It reorders its input in place, so that it gets a copy each time."""
    package = "zipnn"
    _NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

    def __init__(self, dtype: torch.dtype, threads: int):
        import zipnn
        self._codec = zipnn.ZipNN(input_format="byte", bytearray_dtype=self._NAMES[dtype], threads=threads)

    def fresh(self, data: bytes):
        return bytearray(data)

    def compress(self, data):
        return self._codec.compress(data)

    def decompress(self, compressed):
        return self._codec.decompress(compressed)


class Zstandard(Rival):
    """Level 3, its default, on the plain bytes."""
    package = "zstandard"

    def __init__(self, dtype: torch.dtype, threads: int):
        import zstandard
        self._compressor = zstandard.ZstdCompressor(level=3, threads=threads if threads > 1 else 0)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, data):
        return self._compressor.compress(data)

    def decompress(self, compressed):
        return self._decompressor.decompress(compressed)


RIVALS = {"zipnn": ZipNN, "zstd": Zstandard, "nvcomp": NvcompAns}


def of_device(device: str) -> dict[str, str | None]:
    """{name: None, or why it cannot be measured} of the rivals on "cpu" or "cuda"."""
    return {name: rival.absent() for name, rival in RIVALS.items() if rival.device == device}
