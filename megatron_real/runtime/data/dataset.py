"""The sequences of a run: checked as a whole before it starts, dealt out in an order that the seed decides.

What a line may be stands in `dataset_records`, where lines come from in `dataset_readers`.

Invariants (tests/unit/runtime/test_dataset.py):
    - the records of an iteration depend on (data, seed, iteration, batch size) alone, so that a resumed run goes on
      with the next line;
    - every epoch has each line once, in an order of its own;
    - the two records of a pair have consecutive sequence ids 2k and 2k + 1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import DataKind, KeySpec, Per
from megatron_real.errors import ConfigError, raise_problems
from megatron_real.runtime.data.readers import read_lines
from megatron_real.runtime.data.records import DatasetOptions, Record, RecordMaker
from megatron_real.runtime.data.tokenization import ByteTokenizer, Tokenizer

__all__ = ["TOKENS", "ByteTokenizer", "DataBatch", "Dataset", "DatasetOptions", "Record", "Tokenizer"]

logger = logging.getLogger(__name__)

TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
"""The key of the tokens of prompt and response; of the prompt alone while there is no response."""

_EXAMPLES = {
    DataKind.PROMPTS: {"prompt": "Say hello."},
    DataKind.ANSWERS: {"prompt": "Say hello.", "answer": "Hello."},
    DataKind.PAIRS: {"prompt": "Say hello.", "chosen": "Hello.", "rejected": "No."},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBatch:
    """The records of one iteration; the position is the sequence id."""

    records: tuple[Record, ...]

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(len(record.tokens) for record in self.records)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Zeros where responses are generated."""
        return tuple(len(record.response) for record in self.records)

    def columns(self, ids: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        """Column name -> values of the sequences `ids`."""
        names = self.records[0].columns if self.records else ()
        return {name: tuple(self.records[i].columns[name] for i in ids) for name in names}

    def batch(self, ids: Sequence[int], device: torch.device | None = None) -> Batch:
        """The sequences `ids` with the tokens that the data set has: of the prompt, and of its answer if any."""
        chosen = [self.records[i] for i in ids]
        result = Batch(
            ids=tuple(ids),
            prompt_lengths=tuple(len(record.tokens) for record in chosen),
            response_lengths=tuple(len(record.response) for record in chosen),
        )
        flat = [token for record in chosen for token in (*record.tokens, *record.response)]
        result.put(TOKENS, torch.tensor(flat, dtype=torch.int64, device=device))
        return result


class Dataset:
    """The data of a run.

    Args:
        records: in the order of the lines; those of a line follow one another.
        batch_size: lines per iteration.
        samples_per_prompt: how often a line is repeated in a batch, with consecutive sequence ids.
        seed: of the order.
        unit: records per line: 2 for pairs.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        batch_size: int,
        samples_per_prompt: int = 1,
        seed: int = 0,
        unit: int = 1,
    ) -> None:
        if not records or batch_size < 1 or samples_per_prompt < 1:
            raise ConfigError(
                f"data: found {len(records)} records, batch_size={batch_size} and "
                f"samples_per_prompt={samples_per_prompt}; expected at least one of each."
            )
        self.records = tuple(records)
        self.batch_size = batch_size
        self.num_lines = len(self.records) // unit
        self._samples = samples_per_prompt
        self._seed = seed
        self._unit = unit
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def load(cls, source: str | Path, tokenizer: Tokenizer, options: DatasetOptions) -> Dataset:
        """Read a data set.

        Args:
            source: JSONL, a data set of the Hugging Face hub, or a saved one: see `dataset_readers`.
            tokenizer: of the run.
            options: what a line is, how long it may be, and how lines are dealt out.

        Raises:
            ConfigError: it cannot be read, is empty, or has bad lines; names the source and every bad line.
        """
        maker = RecordMaker(str(source), tokenizer, options)
        records = [record for line in read_lines(source) for record in maker.records(line)]
        raise_problems(maker.problems(), subject=str(source), error=ConfigError)
        if not records:
            example = json.dumps(_EXAMPLES[options.kind])
            raise ConfigError(
                f"{source}: found no {options.kind}; expected one JSON object per line, such as {example}."
            )
        return cls(
            records,
            batch_size=options.batch_size,
            samples_per_prompt=options.samples_per_prompt,
            seed=options.seed,
            unit=options.kind.unit,
        )

    def digest(self) -> str:
        """A short name of all records in their order, equal on two ranks if their data and tokenizers agree."""
        digest = hashlib.sha256()
        for record in self.records:
            line = [record.text, record.tokens, record.response, dict(record.columns)]
            digest.update(json.dumps(line, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()[:16]

    def batch(self, iteration: int) -> DataBatch:
        """The records of an iteration. Epochs follow one another without a gap, also inside a batch."""
        begin = iteration * self.batch_size
        chosen: list[int] = []
        for position in range(begin, begin + self.batch_size):
            epoch, offset = divmod(position, self.num_lines)
            chosen.append(self._order(epoch)[offset])
        return self._of_lines(chosen)

    def batches(self) -> tuple[DataBatch, ...]:
        """All whole batches in the order of the lines, each line once: what an evaluation goes through.

        Batches have one size, so that a plan that can cut one can cut all; lines behind the last whole batch are left
        out.

        Raises:
            ConfigError: there is no whole batch.
        """
        count, rest = divmod(self.num_lines, self.batch_size)
        if count == 0:
            raise ConfigError(
                f"evaluation data: found {self.num_lines} lines; expected at least a batch of {self.batch_size}. Add "
                "lines, or lower data.eval_batch_size."
            )
        if rest:
            logger.info(
                "evaluation data: the last %d of %d lines are left out: no whole batch", rest, self.num_lines
            )
        return tuple(
            self._of_lines(range(i * self.batch_size, (i + 1) * self.batch_size)) for i in range(count)
        )

    def _of_lines(self, lines: Sequence[int]) -> DataBatch:
        """The records of some lines, each line repeated as often as it has samples."""
        repeated = [line for line in lines for _ in range(self._samples)]
        return DataBatch(
            records=tuple(
                self.records[self._unit * line + at] for line in repeated for at in range(self._unit)
            )
        )

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(self.num_lines))
            # A string seed is hashed the same everywhere.
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._orders = {known: value for known, value in self._orders.items() if known == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]
