"""Runs of small models for the end-to-end tests: what a rank does, what it notes down, and the same in plain names.

Imports Megatron: import it inside a test, after the `cpu_device` fixture.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import invariance
from benchmarks.invariance_cases import Case, case_tree
from megatron_real.config import RunOptions
from megatron_real.hooks import launch
from megatron_real.process_groups import ProcessGroups
from tests.harness import run_ranks

__all__ = [
    "KeptLog",
    "Recorder",
    "by_layer",
    "by_parameter",
    "copy_weights",
    "load_tensors",
    "run",
    "run_tree",
    "tree_of",
]


class Recorder:
    """A metrics sink that keeps what a rank reports, by iteration."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.calls: list[dict[str, Any]] = []
        self.batch: list[dict[str, Any]] = []

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        while len(self.calls) <= iteration - self.first:
            self.calls.append({})
            self.batch.append({})
        if call is None:
            self.batch[iteration - self.first].update(values)
        else:
            self.calls[iteration - self.first][call] = dict(values)

    def end_iteration(self, iteration: int) -> None:
        self.publish(iteration, None, {})

    def wait_written(self, iteration: int) -> None:
        pass


class KeptLog(logging.Handler):
    """Keeps the messages of the package's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("megatron_real").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def tree_of(case: Case, folder: Path, *, iterations: int = 1, **changes: Any) -> dict[str, Any]:
    """Options of a run of a case; `changes` are merged into the tree level by level."""
    return _merged(case_tree(case, folder, iterations), changes)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def run(case: Case, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a case to its end with its checkpoints; what every rank saw (see `run_tree`)."""
    return run_ranks(case.num_ranks, run_tree, tree_of(case, folder, **options), timeout_s=300)


def run_tree(tree: Mapping[str, Any], *, train: bool = True) -> dict[str, Any]:
    """On a rank: the run that `tree` describes, as `launch.run` does it, without its monitoring.

    Returns:
        ``tokens``, ``calls``, ``before`` and ``after`` as `invariance.run_case` has them, ``batch`` metrics by
        iteration, and the ``log``. After every save, rank 0 keeps the run's state beside it as ``run_state-N.json``.
    """
    log = KeptLog()
    job = launch.prepare(RunOptions.from_tree(tree))
    executor, backend = launch.build_executor(job, ProcessGroups())
    tokens = invariance.record_tokens(backend)
    before = invariance.owned_weights(backend)
    save = backend.save

    def recording_save(folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        save(folder, iteration, state)
        if backend.rank == 0:
            text = (folder / "run_state.json").read_text()
            (folder / f"run_state-{json.loads(text)['iteration']}.json").write_text(text)

    backend.save = recording_save  # type: ignore[method-assign]
    metrics = Recorder(job.first_iteration)
    if train:
        launch._train(job, executor, metrics)  # type: ignore[arg-type]
    return {
        "tokens": tokens,
        "calls": metrics.calls,
        "batch": metrics.batch,
        "before": before,
        "after": invariance.owned_weights(backend),
        "log": log.messages,
    }


def copy_weights(copy: Any) -> dict[str, torch.Tensor]:
    """All parameters of a copy on one rank, by Megatron's names."""
    (chunk,) = copy.chunks
    return {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}


def by_layer(weights: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """From `invariance.assemble`'s names (``actor.decoder.layers.x[3]``) to those of an unsharded module."""
    named = {}
    for name, value in weights.items():
        role, _, rest = name.partition(".")
        if role != model:
            continue
        found = re.fullmatch(r"decoder\.layers\.(.*)\[(\d+)\]", rest)
        named[module_name(f"decoder.layers.{found[2]}.{found[1]}" if found else rest)] = value
    return named


def module_name(key: str) -> str:
    """The parameter that a checkpoint stores under `key`: keys are those of TransformerEngine's layers, where norms are
    parts of the linear layers behind them."""
    for stored, name in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("value_head.weight", "output_layer.weight"),
    ):
        key = key.replace(stored, name)
    return key


def by_parameter(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """From the keys of a checkpoint (`load_tensors`), one for all layers, to the names of an unsharded module."""
    named = {}
    for key, value in tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or not name.startswith(
            ("embedding.", "decoder.", "output_layer.", "value_head.")
        ):
            continue
        if name.startswith("decoder.layers."):
            rest = name.removeprefix("decoder.layers.")
            named |= {module_name(f"decoder.layers.{layer}.{rest}"): part for layer, part in enumerate(value)}
        else:
            named[module_name(name)] = value
    return named


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of a torch_dist checkpoint, read by torch alone: neither Megatron nor ours takes part."""
    from torch.distributed.checkpoint import FileSystemReader, load

    metadata = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    wanted = {
        name: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    load(wanted, checkpoint_id=str(folder), no_dist=True)
    return wanted
