"""Makes the packed text of the quality benchmark from a folder of text files (needs the package tokenizers):

    git clone https://github.com/mlschmitt/classic-books-markdown books && git -C books checkout 944882722e9a96fa6cf2739dc2ea757e101f412f
    python -m benchmarks.scape_quality.prepare books --out runs/scape_quality/text

757 books, public domain; two that are longer than 3.5 MiB (Clarissa, the King James Bible) are left out. The text is not part of this
repository; the manifest has the file names and the tokens' checksums, and so has benchmarks/results/scape_quality_h200.json.
"""
import argparse
from pathlib import Path

from benchmarks.scape_quality import text

SOURCE = "github.com/mlschmitt/classic-books-markdown 944882722e9a96fa6cf2739dc2ea757e101f412f, files below 4 MiB, public domain"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/scape_quality/text"))
    parser.add_argument("--suffixes", default=".md")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--max-mib", type=float, default=42.0, help="of the compressed text")
    parser.add_argument("--source", default=SOURCE)
    args = parser.parse_args(argv)
    manifest = text.pack(args.root, args.out, tuple(args.suffixes.split(",")), int(args.max_mib * 2**20), args.vocab, args.source)
    for name, part in manifest["parts"].items():
        print(f"{name}: {len(part['files'])} files, {part['characters']:,} characters, {part['tokens']:,} tokens, {part['sha256'][:16]}")


if __name__ == "__main__":
    main()
