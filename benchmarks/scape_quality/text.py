"""Real text as tokens: a folder of text files, near copies left out, cut by file into a training part and two held-out ones."""
import bz2
import fcntl
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch

#: Of so many files one is held out for each of the two parts.
HELD_OUT = 60
#: A file is left out if so much of it, in sentences, stands in files before it.
MAX_COPIED = 0.1
#: Bytes of a file; longer ones are left out.
MAX_FILE = 7 << 19
#: Characters of the training part that the byte pairs are learned from.
SAMPLE = 16 << 20
PARTS = ("train", "tune", "report")
PIECE = 8 << 20


def read(root: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Path below ``root`` -> text, of files up to MAX_FILE. In an order that has nothing to do with the paths' own, so that a bound on the
    bytes cuts evenly."""
    files = {file.relative_to(root).as_posix(): file for suffix in suffixes for file in root.rglob(f"*{suffix}")
             if file.is_file() and file.stat().st_size <= MAX_FILE}
    return {name: files[name].read_text(errors="ignore").replace("\0", "") for name in sorted(files, key=_digest)}


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def part_of(name: str) -> str:
    """Which part a file belongs to, by its path alone. Settings are chosen on ``tune``, ``report`` is published."""
    number = int.from_bytes(_digest(name)[-4:], "little") % HELD_OUT
    return "tune" if number == 0 else "report" if number == 1 else "train"


def distinct(texts: dict[str, str], at_least: int = 2000) -> dict[str, str]:
    """Without short files, and without those whose sentences stand in others already: no held-out file is known from training. The
    held-out parts come first, so a file and its copy are on their side."""
    kept, seen = {}, set()
    for name in sorted(texts, key=lambda name: part_of(name) == "train"):
        sentences = {hash(s) for s in re.split(r"[.!?;:]+", re.sub(r"[^a-z.!?;:]+", "", texts[name].lower())) if len(s) >= 30}
        if len(texts[name]) >= at_least and len(sentences & seen) <= MAX_COPIED * len(sentences):
            kept[name] = texts[name]
            seen |= sentences
    return {name: kept[name] for name in texts if name in kept}


def learn_byte_pairs(texts: list[str], vocab: int) -> str:
    """A tokenizer as JSON, from a sample of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    share = min(1.0, SAMPLE / max(1, sum(map(len, texts))))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator([text[:round(share * len(text))] for text in texts], trainer)
    return tokenizer.to_str()


def encode(texts: list[str], tokenizer: str) -> torch.Tensor:
    """uint16: every text's tokens, then 0."""
    from tokenizers import Tokenizer

    encoder, ids = Tokenizer.from_str(tokenizer), []
    for text in texts:
        paragraphs = re.findall(r"(?s).{1,20000}(?:\n|$)|.{1,20000}", text)
        ids += [numpy.array(row.ids, dtype=numpy.uint16) for row in encoder.encode_batch_fast(paragraphs)]
        ids.append(numpy.zeros(1, numpy.uint16))
    return torch.from_numpy(numpy.concatenate(ids) if ids else numpy.zeros(0, numpy.uint16))


def pack(root: Path, folder: Path, suffixes: tuple[str, ...], max_packed: int, vocab: int, source: str) -> dict:
    """Writes the parts, compressed, with their tokenizer and checksums, to ``folder``; returns the manifest. max_packed: bytes of all
    of it; training files that would lead beyond it are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = distinct(read(root, suffixes))
    names = {part: [name for name in texts if part_of(name) == part] for part in PARTS}
    packed = {part: _compress([texts[name] for name in names[part]]) for part in ("tune", "report")}
    left, train, batch = max_packed - sum(map(len, packed["tune"] + packed["report"])), [], []
    packed["train"] = []
    for name in names["train"]:
        batch.append(name)
        if sum(len(texts[n]) for n in batch) >= PIECE or name == names["train"][-1]:
            pieces = _compress([texts[n] for n in batch])
            if sum(map(len, pieces)) > left:
                break
            left -= sum(map(len, pieces))
            packed["train"] += pieces
            train, batch = train + batch, []
    names["train"] = train
    tokenizer = learn_byte_pairs([texts[name] for name in train], vocab)
    parts = {}
    for part in PARTS:
        (folder / f"{part}.bz2").write_bytes(b"".join(packed[part]))
        tokens = encode([texts[name] for name in names[part]], tokenizer)
        parts[part] = {"pieces": [len(piece) for piece in packed[part]], "files": names[part], "tokens": tokens.numel(),
                       "characters": sum(len(texts[name]) for name in names[part]),
                       "sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}
    manifest = {"source": source, "vocab": vocab, "parts": parts}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    (folder / "tokenizer.json").write_text(tokenizer)
    return manifest


def _compress(texts: list[str]) -> list[bytes]:
    """Pieces of about PIECE bytes, each of whole texts, which a 0 character ends."""
    pieces, size = [[]], 0
    for text in texts:
        if size >= PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(text + "\0")
        size += len(text)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda piece: bz2.compress("".join(piece).encode()), pieces))


def unpack(folder: Path) -> dict[str, torch.Tensor]:
    """{part: uint16 tokens}. Raises ValueError if they are not those of the manifest."""
    manifest, tokenizer, tokens = json.loads((folder / "manifest.json").read_text()), (folder / "tokenizer.json").read_text(), {}
    for part, said in manifest["parts"].items():
        data, pieces = (folder / f"{part}.bz2").read_bytes(), []
        for size in said["pieces"]:
            pieces.append(data[:size])
            data = data[size:]
        with ThreadPoolExecutor() as pool:
            texts = "".join(piece.decode() for piece in pool.map(bz2.decompress, pieces)).split("\0")[:-1]
        tokens[part] = encode(texts, tokenizer)
        found = hashlib.sha256(tokens[part].numpy().tobytes()).hexdigest()
        if found != said["sha256"]:
            raise ValueError(f"the tokens of {part} in {folder} are not those that were packed: sha256 {found}, expected {said['sha256']}")
    return tokens


def load(folder: Path) -> dict[str, torch.Tensor]:
    """``unpack``, kept as tokens.npz beside the packed parts. Of several processes one does it and the others wait."""
    kept = folder / "tokens.npz"
    with open(folder / "tokens.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            part = folder / "tokens.part.npz"
            numpy.savez(part, **{name: tokens.numpy() for name, tokens in unpack(folder).items()})
            part.replace(kept)
    with numpy.load(kept) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def places(num_tokens: int, num: int, seq_len: int, seed: int) -> torch.Tensor:
    """int64 [num]: where the sequences of seq_len + 1 tokens begin, one after another. Every pass through the text (an epoch) takes every
    token once, in sequences cut anew and in another order."""
    made, generator = [], torch.Generator("cpu").manual_seed(seed)
    while sum(map(len, made)) < num:
        phase = int(torch.randint(seq_len, (1,), generator=generator, device="cpu"))
        count = (num_tokens - 1 - phase) // seq_len
        made.append(torch.randperm(count, generator=generator, device="cpu") * seq_len + phase)
    return torch.cat(made)[:num]


if __name__ == "__main__":
    load(Path(sys.argv[1]))
