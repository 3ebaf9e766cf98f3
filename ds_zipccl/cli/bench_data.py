"""Data for the benchmarks: distributions by name, and tensors from files of real models."""
import json
from pathlib import Path

import torch

from zipscape.errors import ZipScapeError, describe

SIGMA = 0.02                                 # of every synthetic distribution before its own scaling
ROW_ELEMS = 4096
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SAFETENSORS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def _normal(numel: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(numel, generator=generator, device=generator.device)


def _uniform(numel: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(numel, generator=generator, device=generator.device)


def _student_t3(numel: int, g: torch.Generator) -> torch.Tensor:
    return _normal(numel, g) / (sum(_normal(numel, g).square_() for _ in range(3)) / 3).sqrt_()


def _lognormal_rows(numel: int, g: torch.Generator) -> torch.Tensor:
    scales = _normal(-(-numel // ROW_ELEMS), g).exp_()
    return _normal(numel, g) * scales.repeat_interleave(ROW_ELEMS)[:numel]


#: name -> values of unit scale, fp32 [numel]
DISTRIBUTIONS = {
    "normal": _normal,
    "zeros10": lambda n, g: _normal(n, g) * (_uniform(n, g) >= 0.1),          # one element in ten is zero
    "student_t3": _student_t3,                                               # 3 degrees of freedom: heavy tails
    "lognormal_rows": _lognormal_rows,                                       # rows of 4096 with scales of their own
    "lognormal": lambda n, g: _normal(n, g) * _normal(n, g).exp_(),          # every element with a scale of its own
    "uniform": lambda n, g: 2 * _uniform(n, g) - 1,
    "random_bits": None,                                                     # every bit pattern equally likely
}


def synthetic(name: str, dtype: torch.dtype, numel: int, device: str, seed: int) -> torch.Tensor:
    """[numel] of ``dtype``; the same for the same arguments on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    if DISTRIBUTIONS[name] is None:
        octets = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, device=device, dtype=torch.uint8)
        return octets.view(dtype)
    return (DISTRIBUTIONS[name](numel, generator) * SIGMA).to(dtype)


def load_tensors(path: str) -> list[torch.Tensor]:
    """The non-empty float tensors of a .pt, .pth, .bin (state dict or any nesting of dicts and lists) or .safetensors file, or of all
    such files in a folder. Nothing in the file is executed.

    Raises ZipScapeError when there is nothing to read.
    """
    root = Path(path)
    files = sorted(f for f in root.rglob("*") if f.suffix in _READERS) if root.is_dir() else [root]
    tensors = []
    for file in files:
        try:
            reader = _READERS[file.suffix]
            tensors += [t for t in reader(file) if t.dtype in _FLOATS and t.numel()]
        except (KeyError, OSError, ValueError, RuntimeError, EOFError, ArithmeticError) as error:
            raise ZipScapeError(describe("cannot read tensors", got=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                                         where=str(file), expected=f"a file of a kind in {', '.join(_READERS)}")) from None
        except Exception as error:                                            # pickle.UnpicklingError: weights_only refused it
            raise ZipScapeError(describe("cannot read tensors safely", got=type(error).__name__, where=str(file),
                                         expected="tensors in dicts and lists, nothing that must be executed")) from None
    if not tensors:
        raise ZipScapeError(describe("no float tensors to measure", where=path, expected=f"files of a kind in {', '.join(_READERS)}"))
    return tensors


def _nested(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in inner for tensor in _nested(part)]


def _read_torch(file: Path) -> list[torch.Tensor]:
    return _nested(torch.load(file, map_location="cpu", weights_only=True))


def _read_safetensors(file: Path) -> list[torch.Tensor]:
    size = file.stat().st_size
    octets = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(octets[:8].tolist()), "little")
    if not 8 < start <= size:
        raise ValueError("not a safetensors file")
    entries = json.loads(bytes(octets[8:start].numpy()))
    return [octets[start + e["data_offsets"][0]:start + e["data_offsets"][1]].clone().view(_SAFETENSORS[e["dtype"]])
            for name, e in entries.items() if name != "__metadata__" and e["dtype"] in _SAFETENSORS]


_READERS = {".pt": _read_torch, ".pth": _read_torch, ".bin": _read_torch, ".safetensors": _read_safetensors}


def sample(tensors: list[torch.Tensor], dtype: torch.dtype, numel: int, device: str) -> torch.Tensor:
    """At most ``numel`` elements in ``dtype``: of every tensor its beginning, in proportion to its size."""
    total = sum(t.numel() for t in tensors)
    limit, seen, taken, parts = min(numel, total), 0, 0, []
    for t in tensors:
        seen += t.numel()
        parts.append(t.reshape(-1)[:seen * limit // total - taken].to(dtype))
        taken += parts[-1].numel()
    return torch.cat(parts).to(device)
