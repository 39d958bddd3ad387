"""Where the lines of a data set come from: JSONL files, or Hugging Face's library `datasets`.

A source is written as text:

    prompts.jsonl                 a file with a JSON object per line
    FOLDER                        all ``*.jsonl`` in it in the order of their names; where there are none, what
                                  `datasets` saved there with `save_to_disk` (of several splits the one named train)
    hf:NAME[@CONFIG][:SPLIT]      what `datasets.load_dataset` finds under that name; the split is train unless said

A reader gives every line in its order, as an object or as the problem that it has; what the keys mean is
`dataset_records`' business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_real.errors import ConfigError, Problem

__all__ = ["Line", "read_lines"]

_HUB = "hf:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a data set."""

    where: str
    """``line 3``, ``part2.jsonl: line 3``, ``row 3``"""
    values: dict[str, Any]


def read_lines(source: str | Path) -> Iterator[Line | Problem]:
    """Every line of a source that is not blank, or what is wrong with it.

    Raises:
        ConfigError: it cannot be read at all.
    """
    if str(source).startswith(_HUB):
        yield from _rows(_from_hub(str(source)))
        return
    path = Path(source)
    if not path.is_dir():
        yield from _json_lines(path, "")
    elif files := sorted(path.glob("*.jsonl")):
        for file in files:
            yield from _json_lines(file, f"{file.name}: ")
    else:
        yield from _rows(_from_folder(path))


def _json_lines(path: Path, prefix: str) -> Iterator[Line | Problem]:
    try:
        # Not splitlines: U+2028 and its like may stand in a JSON string. Reading makes "\\n" of "\\r\\n".
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a JSONL file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from error
    for number, text in enumerate(lines, 1):
        if text.strip():
            yield _json_line(f"{prefix}line {number}", text)


def _json_line(where: str, text: str) -> Line | Problem:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        found = f"{text[:40]!r} ({error.msg} at column {error.colno})"
        return Problem(path=where, found=found, expected="a JSON object")
    if not isinstance(values, dict):
        return Problem(path=where, found=f"a JSON {type(values).__name__}", expected="a JSON object")
    return Line(where=where, values=values)


def _rows(rows: Iterable[dict[str, Any]]) -> Iterator[Line]:
    for number, values in enumerate(rows, 1):
        yield Line(where=f"row {number}", values=dict(values))


def _from_hub(source: str) -> Iterable[dict[str, Any]]:
    name, _, split = source.removeprefix(_HUB).partition(":")
    name, _, config = name.partition("@")
    library = _library(source)
    try:
        rows: Iterable[dict[str, Any]] = library.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, LookupError, library.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{source}: cannot be loaded ({type(error).__name__}: {error}). Expected hf:NAME[@CONFIG][:SPLIT], such as "
            "hf:openai/gsm8k@main:train; without network the data set has to be in the cache of `datasets`."
        ) from error
    return rows


def _from_folder(folder: Path) -> Iterable[dict[str, Any]]:
    library = _library(str(folder))
    try:
        loaded = library.load_from_disk(str(folder))
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{folder}: cannot be loaded ({type(error).__name__}: {error}). Expected a folder that `datasets` saved "
            "with `save_to_disk`, or one with JSONL files."
        ) from error
    if isinstance(loaded, library.DatasetDict):
        if "train" not in loaded:
            raise ConfigError(
                f"{folder}: found the splits {sorted(loaded)}; expected one that is named train. Give the folder of "
                "one split."
            )
        loaded = loaded["train"]
    rows: Iterable[dict[str, Any]] = loaded
    return rows


def _library(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source}: the library `datasets` cannot be imported ({error}). Install megatron_real[hf], or give the "
            "path of a JSONL file."
        ) from error
    library: ModuleType = datasets
    return library
