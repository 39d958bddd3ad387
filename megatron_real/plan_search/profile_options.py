"""What `megatron-real profile` is asked to measure: models, shapes, degrees, and how long it may take. No torch.

Invariants (tests/unit/plan_search/test_profile_db.py):
    - the grids contain 1 sequence, the largest sequences and the longest length, in steps of at most `step`;
    - `ProfileOptions.loads(options.dumps()) == options`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_real.errors import ConfigError, Problem, raise_problems

__all__ = ["ProfileOptions"]

Count = Annotated[int, Field(ge=1)]
Value = bool | int | float | str | list[int | float | str] | None

_SHORTEST = 8
"""Tokens: shorter passes cost the same."""


class ProfileOptions(BaseModel):
    """Options of a profile; all have defaults but the ranks and the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: Path = Path("profile.json")
    """Read first, if it is there: what it has is not measured again."""
    num_nodes: Count = 1
    devices_per_node: Count
    """Ranks of a node."""
    device: str | None = None
    """What plans call the device; None takes the name that fits: ``cpu`` without CUDA."""
    megatron: tuple[str, ...] = ()
    """Megatron's arguments, which describe the actor."""
    overrides: dict[str, dict[str, Value]] = {}
    """By role, Megatron arguments that differ from the actor's."""
    roles: tuple[str, ...] = ("actor", "critic")
    """Models to measure, of PPO's. Those with a scalar head (critic, reward) are not measured in generation."""
    max_sequences: Count = 16
    """Of a micro-batch, and of a decoding batch."""
    max_length: Annotated[int, Field(ge=2)] = 256
    """Tokens of prompt and response."""
    max_tokens: Count = 16384
    """Micro-batches of more tokens are not measured; prices grow in proportion from there."""
    step: Annotated[float, Field(gt=1)] = 4.0
    """Factor between neighbouring points of the grids, of sequences and of lengths."""
    tp: tuple[Count, ...] | None = None
    """Tensor-parallel degrees; None is 1, 2, 4, ... up to the ranks of a node, as far as the model goes."""
    sequence_parallel: bool = True
    """Measure tensor parallelism with sequence parallelism too."""
    layers: tuple[Count, Count] = (1, 3)
    """Layers of the two models whose difference is the time of a layer."""
    max_bytes: Count = 64 * 1024 * 1024
    """Of collectives, messages and copies."""
    repetitions: tuple[Count, Count] = (3, 15)
    """At least and at most, of every measurement."""
    seconds: Annotated[float, Field(gt=0)] = 0.5
    """Of repetitions of one measurement, between the two limits above."""

    @model_validator(mode="after")
    def _consistent(self) -> ProfileOptions:
        if self.layers[0] >= self.layers[1]:
            raise ValueError("layers: the second number must be larger than the first")
        if self.repetitions[0] > self.repetitions[1]:
            raise ValueError("repetitions: the second number must not be smaller than the first")
        return self

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.devices_per_node

    def sequence_grid(self) -> tuple[int, ...]:
        """Sequences of a micro-batch to measure at."""
        return _geometric(1, self.max_sequences, self.step)

    def length_grid(self) -> tuple[int, ...]:
        """Lengths to measure at, down to a sixteenth of the longest."""
        return _geometric(
            min(self.max_length, max(_SHORTEST, self.max_length // 16)), self.max_length, self.step
        )

    def middle_shape(self) -> tuple[int, int]:
        """(sequences, length) in the middle of the grids."""
        sequences, lengths = self.sequence_grid(), self.length_grid()
        return sequences[len(sequences) // 2], lengths[len(lengths) // 2]

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(sequences, length), largest first: what does not fit shows at once.

        Of the grids, those of at most ``max_tokens``; at lengths where that leaves sequences out, as many as it allows.
        """
        points: set[tuple[int, int]] = set()
        for length in self.length_grid():
            most = max(1, min(self.max_sequences, self.max_tokens // length))
            points |= {
                (sequences, length) for sequences in (*self.sequence_grid(), most) if sequences <= most
            }
        return tuple(sorted(points, key=lambda point: (-point[0] * point[1], point)))

    def byte_grid(self) -> tuple[int, ...]:
        """Bytes of messages to measure at."""
        return _geometric(min(1024, self.max_bytes), self.max_bytes, 8.0)

    def dumps(self) -> str:
        """JSON text."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> ProfileOptions:
        """Inverse of `dumps`."""
        return cls.model_validate_json(text)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ProfileOptions:
        """From plain data.

        Raises:
            ConfigError: listing every problem.
        """
        try:
            return cls.model_validate(dict(tree))
        except ValidationError as error:
            raise_problems(_problems(error), subject="profile", error=ConfigError)
            raise AssertionError("a validation error without problems") from error


def _problems(error: ValidationError) -> list[Problem]:
    found: dict[str, Problem] = {}
    for item in error.errors():
        path = ".".join(map(str, item["loc"])) or "options"
        if item["type"] == "extra_forbidden":
            expected = f"one of {', '.join(ProfileOptions.model_fields)}"
            found.setdefault(path, Problem(path=path, found="an unknown option", expected=expected))
        else:
            shown = "nothing" if item["type"] == "missing" else repr(item["input"])
            found.setdefault(path, Problem(path=path, found=shown[:80], expected=item["msg"]))
    return list(found.values())


def _geometric(first: int, last: int, factor: float) -> tuple[int, ...]:
    """`first`, `last`, and whole numbers evenly between them, rounded up; neighbours differ by `factor` at most."""
    steps = math.ceil(math.log(last / first) / math.log(factor) - 1e-9)
    between = (first * (last / first) ** (step / steps) for step in range(1, steps))
    return tuple(sorted({first, *(math.ceil(point - 1e-9) for point in between), last}))
