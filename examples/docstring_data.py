"""Text for the demo: the docstrings of the installed Python standard library, as bytes.

    python examples/docstring_data.py runs/demo/data

writes ``train.npy`` (token ids: one byte each, 256 ends a text) and ``prompts.jsonl`` (the beginnings of
docstrings that
are not in ``train.npy``). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy

END_OF_TEXT = 256
HELD_OUT_SHARE = 0.1


def docstrings(root: Path, limit_files: int) -> Iterator[str]:
    """Docstrings of the modules under `root`, in a fixed order."""
    for path in sorted(root.glob("*.py"))[:limit_files]:
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a few files of the library test the parser
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text.isascii() and len(text) >= 24:
                    yield text


def is_held_out(text: str) -> bool:
    """A split by content, so that equal docstrings fall on the same side."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def main() -> None:
    """Write the training tokens and the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--prompt-bytes", type=int, nargs=2, default=(8, 16), help="shortest and longest prompt"
    )
    parser.add_argument("--limit-files", type=int, default=400)
    options = parser.parse_args()
    shortest, longest = options.prompt_bytes
    texts = list(dict.fromkeys(docstrings(Path(sysconfig.get_paths()["stdlib"]), options.limit_files)))
    train = [text for text in texts if not is_held_out(text)]
    held_out = [text for text in texts if is_held_out(text)]
    tokens = numpy.concatenate([[*text.encode(), END_OF_TEXT] for text in train]).astype(numpy.uint16)
    options.folder.mkdir(parents=True, exist_ok=True)
    numpy.save(options.folder / "train.npy", tokens)
    with (options.folder / "prompts.jsonl").open("w") as file:
        for index, text in enumerate(held_out):
            length = shortest + index % (longest - shortest + 1)
            file.write(json.dumps({"prompt": text[:length]}) + "\n")
    print(
        f"{len(train)} docstrings to train on ({tokens.size} tokens), {len(held_out)} prompts: {options.folder}"
    )


if __name__ == "__main__":
    main()
