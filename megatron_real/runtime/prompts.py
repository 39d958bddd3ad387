"""Prompts from a JSONL file: checked as a whole before the run, dealt out in an order that the seed decides.

A line is ``{"prompt": "...", ...columns}``; every line has the same columns, which reward functions get by
name.

Invariants (tests/unit/runtime/test_prompts.py):
    - the prompts of an iteration depend on (file, seed, iteration, batch size) alone;
    - every epoch has each prompt once, in an order of its own.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import ConfigError, Problem, raise_problems

__all__ = ["TOKENS", "ByteTokenizer", "PromptBatch", "PromptOptions", "Prompts", "Record", "Tokenizer"]

TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
"""The key of prompt tokens, then of prompt and response."""

_SHOWN_PROBLEMS = 20


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Token ids 0..255 are UTF-8 bytes, 256 is end-of-text."""

    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; end-of-text has none, and bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How prompts are read and dealt out."""

    batch_size: int
    """Prompts per iteration."""
    samples_per_prompt: int = 1
    max_prompt_tokens: int
    truncate: bool = False
    """Keep the last `max_prompt_tokens` of a longer prompt; otherwise it is an error."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One prompt."""

    text: str
    tokens: tuple[int, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """The prompts of one iteration; the position is the sequence id."""

    records: tuple[Record, ...]

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(len(record.tokens) for record in self.records)

    def columns(self, ids: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        """Column name -> values of the sequences `ids`."""
        names = self.records[0].columns if self.records else ()
        return {name: tuple(self.records[i].columns[name] for i in ids) for name in names}

    def batch(self, ids: Sequence[int], device: torch.device | None = None) -> Batch:
        """The sequences `ids` with their prompt tokens, not generated yet."""
        chosen = [self.records[i] for i in ids]
        result = Batch(
            ids=tuple(ids),
            prompt_lengths=tuple(len(record.tokens) for record in chosen),
            response_lengths=(0,) * len(chosen),
        )
        flat = [token for record in chosen for token in record.tokens]
        result.put(TOKENS, torch.tensor(flat, dtype=torch.int64, device=device))
        return result


class Prompts:
    """The prompts of a run.

    Args:
        records: in file order.
        batch_size: prompts per iteration.
        samples_per_prompt: sequences per prompt; they have consecutive ids.
        seed: of the order.
    """

    def __init__(
        self, records: Sequence[Record], *, batch_size: int, samples_per_prompt: int = 1, seed: int = 0
    ) -> None:
        if not records or batch_size < 1:
            raise ConfigError(
                f"prompts: found {len(records)} prompts and batch_size={batch_size}; expected at least one "
                "of each."
            )
        self.records = tuple(records)
        self.batch_size = batch_size
        self._samples = samples_per_prompt
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer, options: PromptOptions) -> Prompts:
        """Read a JSONL file.

        Raises:
            ConfigError: it cannot be read, is empty, or has bad lines; names the file and every bad line.
        """
        try:
            # Not splitlines: U+2028 and its like may stand in a JSON string. Reading makes "\\n" of "\\r\\n".
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}). Give the path of a JSONL file."
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from error
        reader = _Reader(path=str(path), tokenizer=tokenizer, options=options)
        records = [
            record
            for number, line in enumerate(lines, 1)
            if (record := reader.read(number, line)) is not None
        ]
        raise_problems(reader.shown(), subject=str(path), error=ConfigError)
        if not records:
            raise ConfigError(
                f'{path}: found no prompts; expected one JSON object per line, such as {{"prompt": "Say hello."}}.'
            )
        return cls(
            records,
            batch_size=options.batch_size,
            samples_per_prompt=options.samples_per_prompt,
            seed=options.seed,
        )

    def digest(self) -> str:
        """A short name of all records in their order, equal on two ranks if their files and tokenizers agree."""
        digest = hashlib.sha256()
        for record in self.records:
            line = [record.text, record.tokens, dict(record.columns)]
            digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()[:16]

    def batch(self, iteration: int) -> PromptBatch:
        """The prompts of an iteration. Epochs follow one another without a gap, also inside a batch."""
        begin = iteration * self.batch_size
        chosen: list[Record] = []
        for position in range(begin, begin + self.batch_size):
            epoch, offset = divmod(position, len(self.records))
            chosen += [self.records[self._order(epoch)[offset]]] * self._samples
        return PromptBatch(records=tuple(chosen))

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.records)))
            random.Random(f"{self._seed}:{epoch}").shuffle(
                order
            )  # a string seed is hashed the same everywhere
            self._orders = {known: value for known, value in self._orders.items() if known == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]


class _Reader:
    """Reads lines and collects what is wrong with them."""

    def __init__(self, *, path: str, tokenizer: Tokenizer, options: PromptOptions) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._options = options
        self._problems: list[Problem] = []
        self._columns: tuple[int, frozenset[str]] | None = None

    def shown(self) -> Iterator[Problem]:
        """The first problems, and how many more there are."""
        yield from self._problems[:_SHOWN_PROBLEMS]
        more = len(self._problems) - _SHOWN_PROBLEMS
        if more > 0:
            yield Problem(path=self._path, found=f"{more} more bad lines", expected="none")

    def read(self, number: int, line: str) -> Record | None:
        """The record of one line, or None after noting a problem. Blank lines are skipped."""
        if not line.strip():
            return None
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            self._note(number, f"{line[:40]!r} ({error.msg} at column {error.colno})", "a JSON object")
            return None
        if not isinstance(raw, dict):
            self._note(number, f"a JSON {type(raw).__name__}", 'an object with the key "prompt"')
            return None
        text = raw.pop("prompt", None)
        if not isinstance(text, str):
            found = 'no key "prompt"' if text is None else f"a prompt of type {type(text).__name__}"
            self._note(number, found, '"prompt": a text')
            return None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"half a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start + 1}"
            self._note(number, f"a prompt with {found}", "a text that UTF-8 can write")
            return None
        tokens = self._tokens(number, text)
        if not tokens or not self._columns_fit(number, raw):
            return None
        if len(tokens) > self._options.max_prompt_tokens:
            tokens = tokens[-self._options.max_prompt_tokens :]
            text = self._tokenizer.decode(tokens)
        return Record(text=text, tokens=tuple(tokens), columns=raw)

    def _columns_fit(self, number: int, columns: dict[str, Any]) -> bool:
        """Whether a line has the columns of the first one, under names that a reward function can take."""
        reserved = {"prompts", "responses"} & columns.keys()
        if reserved:
            self._note(
                number, f"the column {min(reserved)!r}", "another name: reward functions get it anyway"
            )
            return False
        if self._columns is None:
            self._columns = (number, frozenset(columns))
        first, names = self._columns
        if names != columns.keys():
            self._note(
                number, f"the columns {sorted(columns)}", f"{sorted(names)}, the columns of line {first}"
            )
            return False
        return True

    def _tokens(self, number: int, text: str) -> list[int]:
        """The tokens of a prompt; none after noting a problem."""
        tokens, limit = self._tokenizer.encode(text), self._options.max_prompt_tokens
        if not tokens:
            self._note(number, "an empty prompt", "at least one token")
        elif len(tokens) > limit and not self._options.truncate:
            self._note(
                number,
                f"a prompt of {len(tokens)} tokens",
                f"at most {limit}; shorten it or allow truncation",
            )
            return []
        return tokens

    def _note(self, number: int, found: str, expected: str) -> None:
        self._problems.append(Problem(path=f"line {number}", found=found, expected=expected))
