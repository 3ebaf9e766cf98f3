"""Real text as tokens: files of this machine, cut by file into a training part and two held-out ones."""
import hashlib
from pathlib import Path

import numpy
import torch

#: One of so many files is held out, for each of the two parts.
HELD_OUT = 100
SAMPLE_BYTES = 16 << 20


def load(path: Path, roots: list[str], suffixes: list[str], max_bytes: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """{"train", "tune", "report": int32 tokens}; made at first use and kept in ``path``. ``tune`` is for choosing settings, ``report`` for
    what is published. Tokens: byte pairs learned from a part of the training text, or bytes where vocab_size is 256."""
    if not path.exists():
        parts = _read(roots, suffixes, max_bytes)
        encode = _tokenizer(parts["train"], vocab_size) if vocab_size != 256 else _bytes
        arrays = {name: encode(texts) for name, texts in parts.items()}
        part = path.with_suffix(".part.npz")
        numpy.savez(part, **arrays)
        part.replace(path)
    with numpy.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name].astype(numpy.int32)) for name in arrays}


def _read(roots, suffixes, max_bytes) -> dict[str, list[str]]:
    files = sorted({file for root in roots for suffix in suffixes for file in Path(root).rglob(f"*{suffix}")})
    # In an order that does not depend on folders: a bound on the bytes then cuts evenly.
    files.sort(key=lambda file: hashlib.sha256(str(file).encode()).digest())
    parts, seen, total = {"train": [], "tune": [], "report": []}, set(), 0
    for file in files:
        try:
            text = file.read_text(errors="ignore")
        except OSError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen:                   # copies of one file must not stand on both sides
            continue
        seen.add(digest)
        number = int.from_bytes(digest[:4], "little") % HELD_OUT
        parts["tune" if number == 0 else "report" if number == 1 else "train"].append(text)
        total += len(text)
        if total >= max_bytes:
            break
    return parts


def _bytes(texts: list[str]) -> numpy.ndarray:
    return numpy.frombuffer("\n".join(texts).encode(), dtype=numpy.uint8)


def _tokenizer(texts: list[str], vocab_size: int):
    from tokenizers import ByteLevelBPETokenizer

    sample, size = [], 0
    for text in texts:
        sample.append(text)
        size += len(text)
        if size >= SAMPLE_BYTES:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sample, vocab_size=vocab_size)

    def encode(texts: list[str]) -> numpy.ndarray:
        chunks = []
        for start in range(0, len(texts), 512):
            chunks += [numpy.array(e.ids, dtype=numpy.uint16) for e in tokenizer.encode_batch(texts[start:start + 512])]
        return numpy.concatenate(chunks) if chunks else numpy.zeros(0, numpy.uint16)

    return encode


def batch(tokens: torch.Tensor, size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [size, seq_len + 1] from random places."""
    starts = torch.randint(tokens.numel() - seq_len - 1, (size,), generator=generator)
    return torch.stack([tokens[start:start + seq_len + 1] for start in starts.tolist()]).long()
