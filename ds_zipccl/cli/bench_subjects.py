"""What the codec bench measures: our kernel sets and the rivals, each prepared for one tensor."""
import torch

from ds_zipccl.cli.bench_rivals import RIVALS
from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.analysis import needed_bytes, tile_escapes
from ds_zipccl.codec.codec import Codec, compress, decompress
from ds_zipccl.codec.dtypes import BY_TORCH


class Subject:
    """One implementation and one tensor ``x`` [n]. ``compress`` and ``decompress`` are what is timed; ``prepare_compress`` is not.
    ``decoded()``: what the last ``decompress`` gave, bytes.
    ``facts``: what is known without a clock, as row fields."""
    facts: dict

    def prepare_compress(self) -> None:
        pass

    def close(self) -> None:
        """Gives back what Python does not."""


class Zipped(Subject):
    """A kernel set on the hot path: known layout, memory allocated beforehand, no waiting. The layout is what ``compress`` found."""

    def __init__(self, x: torch.Tensor, kernels: str, header: fmt.Header):
        self._codec = Codec.of(x.dtype, x.numel(), x.device.type, escapes_per_block=header.escapes_per_block,
                               spill_per_tile=header.spill_per_tile, window_lo=header.window_lo, level=header.level, kernels=kernels)
        self._rows, self._out = x.view(1, -1), _filled_like(x).view(1, -1)
        self._frames = self._codec.empty_frames(1, x.device)
        self._status = torch.zeros(1, dtype=torch.int32, device=x.device)
        self.compress()
        num_escapes = int(tile_escapes(self._frames[0], self._codec.geometry).sum())
        escapes = {"escapes_percent": 100 * num_escapes / x.numel()} if header.level == 1 else {"stream_bits": 8 * num_escapes / x.numel()}
        self.facts = {"path": "zipped", "wire_bytes": self._codec.frame_bytes, **escapes,
                      "needed_bytes": needed_bytes(num_escapes, BY_TORCH[x.dtype], x.numel(), header.level),
                      "escapes_per_block": header.escapes_per_block, "spill_per_tile": header.spill_per_tile}

    def compress(self) -> None:
        self._codec.encode(self._rows, self._frames, self._status)

    def decompress(self) -> None:
        self._codec.decode(self._frames, self._out)

    def decoded(self) -> torch.Tensor:
        self._codec.raise_on_error(self._out.device)
        return self._out.view(-1).view(torch.uint8)


class Stored(Subject):
    """Data that ``compress`` stores raw: the whole functions, the attempt included."""

    def __init__(self, x: torch.Tensor, kernels: str, window_lo: int, level: int):
        self._x, self._kernels, self._window_lo, self._level, self._out = x, kernels, window_lo, level, _filled_like(x)
        self.compress()
        self.facts = {"path": "raw", "wire_bytes": self._frame.numel(), "needed_bytes": self._frame.numel()}

    def compress(self) -> None:
        self._frame = compress(self._x, kernels=self._kernels, window_lo=self._window_lo, level=self._level)

    def decompress(self) -> None:
        decompress(self._frame, self._out, kernels=self._kernels)

    def decoded(self) -> torch.Tensor:
        return self._out.view(torch.uint8)


class HostRival(Subject):
    """Another compressor on the same bytes, in host memory."""

    def __init__(self, x: torch.Tensor, name: str, threads: int):
        self._rival = RIVALS[name](x.dtype, threads)
        self._data = bytes(x.view(torch.uint8).numpy())
        self.prepare_compress()
        self.compress()
        self.facts = {"path": "zipped", "wire_bytes": len(self._compressed), "needed_bytes": len(self._compressed)}

    def prepare_compress(self) -> None:
        self._input = self._rival.fresh(self._data)

    def compress(self) -> None:
        self._compressed = self._rival.compress(self._input)

    def decompress(self) -> None:
        self._out = self._rival.decompress(self._compressed)

    def decoded(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._out), dtype=torch.uint8)


class DeviceRival(Subject):
    """Another compressor on the same tensor, on the GPU: queued on the current stream like ours."""

    def __init__(self, x: torch.Tensor, name: str):
        self._out = _filled_like(x)
        self._rival = RIVALS[name](x, self._out)
        self.compress, self.decompress = self._rival.compress, self._rival.decompress
        self.facts = {"path": "zipped", "wire_bytes": self._rival.wire_bytes, "needed_bytes": self._rival.wire_bytes}

    def decoded(self) -> torch.Tensor:
        return self._out.view(torch.uint8)

    def close(self) -> None:
        self._rival.close()


def rival(x: torch.Tensor, name: str, threads: int) -> Subject:
    return HostRival(x, name, threads) if RIVALS[name].device == "cpu" else DeviceRival(x, name)


def ours(x: torch.Tensor, kernels: str, window_lo: int, level: int) -> Subject:
    header = fmt.parse_header(bytes(compress(x, kernels=kernels, window_lo=window_lo, level=level)[:fmt.HEADER_BYTES].tolist()))
    if header.mode == fmt.MODE_RAW:
        return Stored(x, kernels, window_lo, level)
    return Zipped(x, kernels, header)


def _filled_like(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out.view(torch.uint8).fill_(0xAA)
    return out
