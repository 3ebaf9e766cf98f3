"""Text as bytes: one's own file or folder, or the Python standard library's sources on this machine."""
import sysconfig
from pathlib import Path

import torch

VOCAB_SIZE = 256


def source_files(data):
    """The files to read, sorted so that every machine with the same files sees the same text."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    root = Path(data)
    if not root.exists():
        raise ValueError(f"--data {data}: no such file or folder")
    if root.is_file():
        return [root]
    return sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith("."))


def load(data, max_mb, seq_len):
    """Training and validation text (the last tenth), two uint8 tensors; at most max_mb * 1e6 bytes together.

    Raises ValueError or OSError with a message for the user.
    """
    limit, text = int(max_mb * 1e6), bytearray()
    files = source_files(data)
    for path in files:
        with path.open("rb") as file:
            text += file.read(limit - len(text))
        if len(text) >= limit:
            break
    where = f"--data {data}" if data else "the standard library's sources"
    if not text:
        raise ValueError(f"{where}: no text found ({len(files)} files)")
    num_train = len(text) * 9 // 10
    if min(num_train, len(text) - num_train) <= seq_len:
        raise ValueError(f"{where}: {len(text)} bytes are too few for --seq-len {seq_len}; "
                         f"need at least {10 * (seq_len + 1)}")
    text = torch.frombuffer(text, dtype=torch.uint8)
    return text[:num_train], text[num_train:]


def batch(text, num_samples, seq_len, generator, device):
    """Inputs and targets (the next bytes), int64 [num_samples, seq_len] each, from random places of the text."""
    starts = torch.randint(len(text) - seq_len, (num_samples, 1), generator=generator)
    samples = text[starts + torch.arange(seq_len + 1)].long().to(device)
    return samples[:, :-1], samples[:, 1:]
