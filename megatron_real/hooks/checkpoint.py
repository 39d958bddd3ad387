"""Checkpoints in Megatron's distributed format: read those that Megatron wrote, write those that Megatron reads.

One directory per model. `torch.distributed.checkpoint` meets on WORLD, so every rank joins each save and load; ranks
without the model bring nothing. What is wrong with a checkpoint (missing, legacy format, another shape) is found from
its metadata before the first collective.

Invariants (tests/e2e/test_resume.py, test_megatron_checkpoints.py, test_broken_checkpoints.py):
    - a resumed run gives the numbers of an uninterrupted one, bit for bit under the same plan;
    - Megatron's own `load_checkpoint` reads model, optimizer and scheduler under any layout;
    - a save that was interrupted is not taken for one: the run's state names an iteration that every model has.
"""

from __future__ import annotations

import contextlib
import copy as copy_module
import pickle
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedBase, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.roles import architecture_of
from megatron_real.realloc_ops.planning.shards import TensorSpec
from megatron_real.runtime.run_state import write_atomically

__all__ = [
    "at_hand",
    "check_architecture",
    "check_tensors",
    "find_checkpoint",
    "load_copy",
    "read_common",
    "save_copy",
]

TRACKER = "latest_checkpointed_iteration.txt"
_FRESH_HEAD = "value_head."
_VOCABULARY = ("embedding.word_embeddings.", "output_layer.")
_Shape = tuple[int | None, ...]
"""Of a whole tensor; None is any size."""
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Megatron needs to know of the content to read it back (its ``content_metadata``)."""


def find_checkpoint(folder: str | Path, iteration: int | None = None) -> Path:
    """The iteration folder of a Megatron checkpoint: the one its tracker file names, or `iteration`.

    Raises:
        ConfigError: there is none, or it is in Megatron's legacy format.
    """
    root = Path(folder)
    name = f"iter_{iteration:07d}" if iteration is not None else _tracked(root)
    found = root / name
    if not found.is_dir():
        raise ConfigError(
            f"checkpoint {root}: found no folder {name}; its {TRACKER} names it. The checkpoint is incomplete."
        )
    if any(found.glob("mp_rank_*")):
        raise ConfigError(
            f"checkpoint {found}: found Megatron's legacy format (mp_rank_* folders); expected torch_dist. Convert it: "
            "start the training script that wrote it with --ckpt-convert-format torch_dist."
        )
    if not (found / ".metadata").exists() and (found / "metadata.json").exists():
        raise ConfigError(
            f"checkpoint {found}: found no .metadata; the checkpoint is incomplete: its save did not end. Give another."
        )
    if not dist_checkpointing.check_is_distributed_checkpoint(str(found)):
        raise ConfigError(
            f"checkpoint {found}: found no metadata.json; expected a Megatron torch_dist checkpoint."
        )
    return found


def _tracked(root: Path) -> str:
    tracker = root / TRACKER
    try:
        text = tracker.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"checkpoint {root}: {tracker.name} cannot be read ({error.strerror}). Give a folder that Megatron saved."
        ) from error
    if text == "release":
        return "release"
    if not text.isdigit():
        raise ConfigError(f"checkpoint {root}: {TRACKER} has {text!r}; expected an iteration or 'release'.")
    return f"iter_{int(text):07d}"


def read_common(found: Path) -> dict[str, Any]:
    """What a checkpoint stores besides tensors (``args``, ``iteration``, ...). No collective.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return dict(dist_checkpointing.load_common_state_dict(str(found)))
    except (CheckpointException, CheckpointingException, OSError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[-1]  # torch's text ends with the cause
        raise ConfigError(
            f"checkpoint {found}: cannot be read ({reason}). It is incomplete or damaged: give another."
        ) from error


def check_architecture(role: str, args: Namespace, stored: Namespace, found: Path) -> None:
    """Compare the architecture that was asked for with the one that a checkpoint stores.

    Raises:
        ConfigError: listing every argument that differs.
    """
    mine, theirs = architecture_of(args), architecture_of(stored)
    ignored = {"max_position_embeddings"} if mine.get("position_embedding_type") == "rope" else set()
    raise_problems(
        (
            Problem(
                path=f"--{name.replace('_', '-')}",
                found=repr(mine[name]),
                expected=f"{theirs[name]!r}, as stored",
            )
            for name in mine.keys() & theirs.keys() - ignored
            if mine[name] != theirs[name]
        ),
        subject=f"{role}: checkpoint {found} has another shape",
        error=ConfigError,
    )


def _metadata(copy: ModelCopy) -> dict[str, Any]:
    return {**_CONTENT, "dp_cp_group": copy.parallel.pg_collection.dp_cp}


def _model_state(copy: ModelCopy, metadata: Mapping[str, Any]) -> dict[str, Any]:
    several = len(copy.chunks) > 1
    return {
        f"model{index if several else ''}": chunk.sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(copy.chunks)
    }


def load_copy(
    copy: ModelCopy | None,
    role: str,
    found: Path,
    *,
    specs: Mapping[str, TensorSpec],
    version: int = 0,
    optimizer: bool = False,
) -> list[str]:
    """Load weights, and the optimizer's state if asked for, into a copy.

    Collective over WORLD; ranks outside the copy's mesh pass None. A scalar head that the checkpoint does not have
    keeps its fresh values; so do padding rows of the vocabulary beyond the stored ones.

    Args:
        specs: every tensor of the whole model, the same on all ranks.
        version: the copy's version afterwards.

    Returns:
        Parameters that the checkpoint did not have, on every rank.

    Raises:
        ConfigError: a parameter is missing or has another shape (all of them listed), on every rank and before any
            collective.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(found))
    fresh = [key for key in specs if key.startswith(_FRESH_HEAD) and key not in stored]
    shapes = {key: _any_rows(key, spec.global_shape) for key, spec in specs.items() if key not in fresh}
    _compare_shapes(role, shapes, stored, found)
    state: dict[str, Any] = {}
    if copy is not None:
        with copy.parallel.active():
            metadata = _metadata(copy)
            state = _model_state(copy, metadata)
            if optimizer:
                assert copy.optimizer is not None, "a frozen copy has no optimizer to load"
                state["optimizer"] = copy.optimizer.sharded_state_dict(
                    state, is_loading=True, metadata=metadata
                )
            _drop(state, fresh)
    loaded = dist_checkpointing.load(state, str(found), validate_access_integrity=False)
    if copy is not None:
        with copy.parallel.active():
            for index, chunk in enumerate(copy.chunks):
                name = f"model{index if len(copy.chunks) > 1 else ''}"
                missing, _ = chunk.load_state_dict(loaded[name], strict=False)
                unset = [
                    key for key in missing if not key.endswith("_extra_state") and not _is_head(key, fresh)
                ]
                assert not unset, f"load_state_dict left {unset} unset"
        copy.weights_arrived(version)
        if optimizer:
            _take_learning_rates(loaded["optimizer"], copy.optimizer.param_groups)
            with copy.parallel.active():
                copy.optimizer.load_state_dict(loaded["optimizer"])
            if copy.scheduler is not None:
                copy.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return fresh


def _take_learning_rates(state: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Let this run's learning rates win over the stored ones, by which Megatron would look for parameter groups."""
    rates = {(group.get("max_lr"), group.get("min_lr")) for group in groups}
    if len(rates) > 1:
        return  # groups differ in their rates, so these must be the stored ones
    if isinstance(state, dict):
        for stored in state.get("param_groups", ()):
            stored["max_lr"], stored["min_lr"] = next(iter(rates))
        for inner in state.values():
            _take_learning_rates(inner, groups)


def _is_head(key: str, fresh: list[str]) -> bool:
    return bool(fresh) and key.startswith("output_layer")


def _drop(state: dict[str, Any], fresh: list[str]) -> None:
    """Take parameters that the checkpoint does not have out of what is loaded."""
    for chunk_state in state.values():
        for name in list(chunk_state):
            entry = chunk_state[name]
            if isinstance(entry, ShardedTensor) and entry.key in fresh:
                del chunk_state[name]


def check_tensors(model: RoleModel, found: Path) -> None:
    """Compare the tensors of a checkpoint with those that `model` will have, as far as that is known unbuilt.

    Reads the checkpoint's metadata only. No collective.

    Raises:
        ConfigError: listing every tensor that is missing or has another shape.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(found))
    shapes = _known_shapes(model)
    if any(key.startswith("decoder.layers.0.") for key in stored):  # layers that differ are stored one by one
        shapes = {key: shape for key, shape in shapes.items() if not key.startswith("decoder.layers.")}
    _compare_shapes(model.role, shapes, stored, found)
    rows = stored["embedding.word_embeddings.weight"].global_shape[0]
    if rows < model.vocab_size:
        raise ConfigError(
            f"{model.role}: checkpoint {found}: found embeddings of {rows} tokens; expected at least the vocabulary's "
            f"{model.vocab_size}. Give the tokenizer that the checkpoint was trained with."
        )


def _known_shapes(model: RoleModel) -> dict[str, _Shape]:
    config = model.config
    hidden, layers, heads = config.hidden_size, config.num_layers, config.num_attention_heads
    shapes: dict[str, _Shape] = {
        "embedding.word_embeddings.weight": (None, hidden),
        f"decoder.{'final_layernorm' if model.hybrid_layer_pattern is None else 'final_norm'}.weight": (
            hidden,
        ),
    }
    if not (model.scalar_head or model.ties):
        shapes["output_layer.weight"] = (None, hidden)
    if not config.multi_latent_attention:
        groups = config.num_query_groups or heads
        qkv = (heads + 2 * groups) * config.kv_channels
        shapes["decoder.layers.self_attention.linear_qkv.weight"] = (layers, qkv, hidden)
        shapes["decoder.layers.self_attention.linear_proj.weight"] = (
            layers,
            hidden,
            heads * config.kv_channels,
        )
    if config.num_moe_experts is None:
        ffn = config.ffn_hidden_size
        shapes["decoder.layers.mlp.linear_fc1.weight"] = (
            layers,
            ffn * (1 + config.gated_linear_unit),
            hidden,
        )
        shapes["decoder.layers.mlp.linear_fc2.weight"] = (layers, hidden, ffn)
    return shapes


def _any_rows(key: str, shape: tuple[int, ...]) -> _Shape:
    """The padding of the vocabulary may differ."""
    return (None, *shape[1:]) if key.startswith(_VOCABULARY) else shape


def _compare_shapes(role: str, shapes: Mapping[str, _Shape], stored: Mapping[str, Any], found: Path) -> None:
    problems = []
    for key, shape in sorted(shapes.items()):
        if key not in stored:
            problems.append(Problem(path=key, found="no such parameter", expected=_shown(shape)))
            continue
        other = tuple(stored[key].global_shape)
        if len(other) != len(shape) or any(n not in (None, m) for n, m in zip(shape, other, strict=True)):
            problems.append(Problem(path=key, found=_shown(other), expected=_shown(shape)))
    raise_problems(problems, subject=f"{role}: checkpoint {found} has another shape", error=ConfigError)


def _shown(shape: _Shape) -> str:
    return " x ".join("vocabulary" if size is None else str(size) for size in shape)


@contextlib.contextmanager
def at_hand(copy: ModelCopy | None) -> Iterator[None]:
    """Have all of a copy on the device for a block, then let it go back to the host if it rested there.

    Of a trained copy that is the optimizer's state, of a frozen one its weights. Not collective.

    Raises:
        CapacityError: it does not fit on the device beside what is there.
    """
    away = copy is not None and not copy.trainable and not copy.resident
    if copy is not None and away:
        copy.reload()
    try:
        with copy.with_state() if copy is not None else contextlib.nullcontext():
            yield
    finally:
        if copy is not None and away:
            copy.offload("host")


def save_copy(
    copy: ModelCopy | None,
    folder: Path,
    iteration: int,
    args: Namespace,
    *,
    owner: int,
    optimizer: bool = True,
) -> None:
    """Write one model, with its optimizer if it has one, as a checkpoint that Megatron's own `load_checkpoint` reads.

    Collective over WORLD; ranks outside the copy's mesh pass None. `owner` is a rank inside the mesh: what the
    optimizer keeps besides tensors is brought from it to rank 0, which writes it. What rests on the host is on the
    device while it is saved. `optimizer` tells all ranks whether there is one.

    Raises:
        OSError: the folder cannot be written.
        CapacityError: what rests on the host does not fit on the device beside what is there.
    """
    with at_hand(copy):
        _save(copy, folder, iteration, _storable(args, optimizer), owner)


def _save(copy: ModelCopy | None, folder: Path, iteration: int, args: Namespace, owner: int) -> None:
    target = folder / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)  # of a save that was not finished, perhaps by more ranks
        target.mkdir(parents=True)
    torch.distributed.barrier()
    state: dict[str, Any] = {}
    common: dict[str, Any] = {}
    if copy is not None:
        with copy.parallel.active():
            metadata = _metadata(copy)
            state = _model_state(copy, metadata)
            if copy.optimizer is not None:
                state["optimizer"] = copy.optimizer.sharded_state_dict(state, metadata=metadata)
            probe, _ = extract_matching_values(state, lambda value: True)
            _, common = extract_matching_values(probe, lambda value: isinstance(value, ShardedBase))
            if copy.scheduler is not None:
                common["opt_param_scheduler"] = copy.scheduler.state_dict()
    shared: list[Any] = [common if torch.distributed.get_rank() == owner else None]
    torch.distributed.broadcast_object_list(shared, src=owner)
    _merge(state, shared[0])
    state.update({"args": args, "checkpoint_version": 3.0, "iteration": iteration})
    dist_checkpointing.save(
        state, str(target), content_metadata=dict(_CONTENT), validate_access_integrity=False
    )
    if torch.distributed.get_rank() == 0:
        write_atomically(folder / TRACKER, str(iteration))


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what `other` has and `into` lacks, level by level."""
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into.setdefault(name, value)


def _storable(args: Namespace, optimizer: bool) -> Namespace:
    """Arguments without what only our run has and Megatron could not read back."""
    kept = copy_module.copy(args)
    for name in [name for name in vars(kept) if name.startswith("real_")]:
        delattr(kept, name)
    kept.no_save_rng = True  # sampling is keyed; there is no RNG state to go on from
    kept.no_save_optim = not optimizer
    return kept
