"""A profile: times of operations measured on one device, with where they come from, as one JSON file.

Entries are keyed by what was run (operation, shape of the layer or head, coordinates), not by a model's role, so that
one file serves models of several shapes. A file holds measurements of one device under one set of versions: others are
kept in files of their own. `megatron-real profile` writes it, `costs.profiled.ProfiledCost` prices with it. No torch.

Invariants (tests/unit/plan_search/test_profile_db.py):
    - `ProfileDatabase.loads(database.dumps()) == database`; `hash` depends on the content alone, not on the order;
    - no two entries have one key; what is not a sound file is refused with one error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_real.errors import ConfigError
from megatron_real.plan_search.models import ModelSpec

__all__ = [
    "Entry",
    "EntryKey",
    "Operation",
    "ProfileDatabase",
    "Provenance",
    "describe",
    "head_key",
    "layer_key",
]

_VERSION = 1
_MAX_SHOWN = 6

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
EntryKey = tuple[str, str, str, tuple[tuple[str, float], ...]]
"""Operation, shape, kind, coordinates by name."""


class Operation(StrEnum):
    """What an entry is the time of. Coordinates (keys of `Entry.at`) are in brackets."""

    LAYER = "layer"
    """One decoder layer with the collectives in it [tp sp tp_nodes sequences length context]; `kind` is a `Pass`."""
    REST = "rest"
    """A pass without its layers: embedding, head for one logit position per sequence, the schedule and the padding
    [tp sp tp_nodes vocab sequences length context]; `kind` is a `Pass`."""
    EMBEDDING = "embedding"
    """The word embedding alone, which `REST` contains [tp sp tp_nodes vocab tokens]; `kind` is a `Pass`."""
    LOGITS = "logits"
    """A pass over one layer of one shape, by logit positions [tp sp tp_nodes vocab logits]; `kind` is a `Pass`."""
    ZERO_GRADIENTS = "zero_gradients"
    """Clearing the gradient buffer [tp parameters]."""
    OPTIMIZER = "optimizer"
    """From the end of the last backward pass to the end of Adam's step, without data parallelism
    [tp parameters]."""
    CALL = "call"
    """A call without its passes and optimizer steps; `kind` is a `CallType`."""
    COLLECTIVE = "collective"
    """`kind` is a `Collective` [group num_nodes bytes]."""
    POINT_TO_POINT = "point_to_point"
    """One message, from the send to its receipt [within_node bytes]."""
    EXCHANGE = "exchange"
    """Two ranks that send to each other at the same time [within_node bytes]."""
    LOCAL_COPY = "local_copy"
    """[bytes]"""
    HOST_COPY = "host_copy"
    """[bytes]"""
    CONTENTION = "contention"
    """A pass per layer of a model of a few layers, or an optimizer step, while this many ranks of a node are at work
    [tp sequences length busy]; `kind` is a `Pass` or ``optimizer``. Only where the ranks of a node share its cores."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Provenance(_Strict):
    """Where measurements come from."""

    device: str
    """Name in ``plan_search/devices``, or of the user's own device."""
    device_model: str
    """As the driver or the operating system calls it."""
    cpu_model: str
    host: str
    num_cores: Count
    """Cores of a node that its ranks may use."""
    threads: Count
    """Threads of a rank."""
    pinned: bool
    """Whether each rank had a core of its own."""
    backend: str
    """Of ``torch.distributed``."""
    num_ranks: Count
    ranks_per_node: Count
    versions: dict[str, str]
    """Of Python, torch, megatron-core and megatron-real."""
    implementation: str
    """``transformer_engine`` or ``local``: whose layers."""
    date: str
    """UTC, when the first entry was measured."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks that compute on cores had none of their own."""
        return self.device_model == self.cpu_model and self.num_cores < self.ranks_per_node

    def differences(self, other: Provenance) -> list[str]:
        """Why measurements of the two cannot stand side by side; empty if they can."""
        free = {"date", "host"}
        mine, theirs = (_flat(one.model_dump(exclude=free)) for one in (self, other))
        return [
            f"{name}={theirs.get(name)} (not {mine.get(name)})"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]


class Entry(_Strict):
    """One measured time."""

    operation: Operation
    kind: str = ""
    """Which pass, collective or call, where an operation has several."""
    shape: str = ""
    """From `layer_key` or `head_key`; empty where no model is involved."""
    at: dict[str, float] = {}
    """Coordinates: see `Operation`. Flags are 0 or 1."""
    median_s: Seconds
    spread_s: Seconds
    """Between the quartiles of the repetitions."""
    repetitions: Count

    @property
    def key(self) -> EntryKey:
        return (self.operation.value, self.shape, self.kind, tuple(sorted(self.at.items())))


class ProfileDatabase(_Strict):
    """Measurements of one device. Immutable: `merged` gives another one."""

    version: Literal[1] = 1
    provenance: Provenance
    entries: tuple[Entry, ...] = ()

    @property
    def hash(self) -> str:
        """16 hexadecimal digits over provenance and entries."""
        content = self.model_dump(mode="json")
        content["entries"] = [
            entry.model_dump(mode="json") for entry in sorted(self.entries, key=lambda entry: entry.key)
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def known(self) -> frozenset[EntryKey]:
        """What is measured."""
        return frozenset(entry.key for entry in self.entries)

    def find(self, operation: Operation, *, kind: str = "", shape: str = "") -> tuple[Entry, ...]:
        """All entries of an operation, in the order of the file."""
        wanted = (operation, kind, shape)
        return tuple(entry for entry in self.entries if (entry.operation, entry.kind, entry.shape) == wanted)

    def merged(self, entries: Iterable[Entry]) -> ProfileDatabase:
        """With `entries`, which take the place of those that have their keys."""
        by_key = {entry.key: entry for entry in self.entries}
        by_key.update((entry.key, entry) for entry in entries)
        return self.model_copy(update={"entries": tuple(by_key.values())})

    def dumps(self) -> str:
        """JSON text, one entry per line."""
        head = json.dumps({"version": self.version, "provenance": self.provenance.model_dump(mode="json")})
        lines = ",\n".join(json.dumps(_trimmed(entry)) for entry in self.entries)
        return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n'

    def dump(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(self.dumps())
            os.replace(partial, path)
        except OSError as error:
            raise ConfigError(
                f"profile: {path}: cannot be written ({error.strerror}). Give a file in a folder that exists."
            ) from error

    @classmethod
    def loads(cls, text: str, *, source: str = "profile") -> ProfileDatabase:
        """Inverse of `dumps`.

        Raises:
            ConfigError: naming what is wrong.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{source}: found no JSON ({error}); expected a profile. Measure again."
            ) from error
        version = raw.get("version") if isinstance(raw, Mapping) else None
        if version != _VERSION:
            raise ConfigError(
                f"{source}: found version {version!r}; expected {_VERSION}. Measure again with megatron-real profile."
            )
        try:
            database = cls.model_validate(raw)
        except ValidationError as error:
            problems = list(_problems(error))
            more = f" and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
            raise ConfigError(
                f"{source}: found no sound profile: {'; '.join(problems[:_MAX_SHOWN])}{more}. Measure again with "
                "megatron-real profile."
            ) from error
        if len(database.known()) != len(database.entries):
            twice = next(_repeated(database.entries))
            raise ConfigError(
                f"{source}: found two entries of {describe(twice)}; expected one. Remove one of them."
            )
        return database

    @classmethod
    def load(cls, path: Path) -> ProfileDatabase:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or is no profile.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read ({error}). Give a profile that megatron-real profile wrote."
            ) from error
        return cls.loads(text, source=str(path))


def layer_key(model: ModelSpec, layer: int) -> str:
    """The shape of one decoder layer (0-based): layers of equal shape have equal times."""
    shape = model.shape
    parts = [
        f"hidden={shape.hidden_size}",
        f"heads={shape.num_attention_heads}",
        f"groups={shape.num_query_groups}",
        f"head={shape.head_width}",
    ]
    if shape.has_experts(layer):
        parts.append(f"experts={shape.num_experts}x{shape.expert_width} top={shape.experts_per_token}")
        if shape.shared_expert_ffn_hidden_size:
            parts.append(f"shared={shape.shared_expert_ffn_hidden_size}")
    else:
        parts.append(f"ffn={shape.ffn_hidden_size}")
    flags = {
        "gated": shape.gated_mlp,
        "bias": shape.linear_bias,
        "qkv_bias": shape.qkv_bias,
        "qk_norm": shape.qk_norm,
    }
    parts += [name for name, value in flags.items() if value]
    return " ".join([*parts, model.param_dtype])


def head_key(model: ModelSpec) -> str:
    """The shape of embedding and head; their vocabulary is a coordinate."""
    shape = model.shape
    parts = [f"hidden={shape.hidden_size}", "scalar" if shape.scalar_head else "lm"]
    if shape.learned_positions:
        parts.append(f"positions={shape.learned_positions}")
    return " ".join([*parts, model.param_dtype])


def describe(entry: Entry) -> str:
    """An entry's key for people."""
    where = " ".join(f"{name}={value:g}" for name, value in sorted(entry.at.items()))
    return " ".join(part for part in (entry.operation, entry.kind, entry.shape, where) if part)


def _trimmed(entry: Entry) -> dict[str, object]:
    """As JSON, without empty parts, times to seven digits and whole coordinates as integers."""
    raw = entry.model_dump(mode="json", exclude_defaults=True)
    if entry.at:
        raw["at"] = {
            name: int(value) if float(value).is_integer() else value for name, value in entry.at.items()
        }
    return raw


def _flat(tree: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat({f"{name}.{inner}": part for inner, part in value.items()}))
        else:
            flat[name] = value
    return flat


def _problems(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        yield f"{'.'.join(map(str, item['loc']))}: {item['msg']}"


def _repeated(entries: Iterable[Entry]) -> Iterator[Entry]:
    seen: set[EntryKey] = set()
    for entry in entries:
        if entry.key in seen:
            yield entry
        seen.add(entry.key)
