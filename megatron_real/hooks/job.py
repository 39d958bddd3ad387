"""A run whose input was read and checked: plans, arguments, checkpoints, prompts, batch sizes.

Nothing here is collective. Every rank reads and checks the same, so what is wrong is refused on all of them alike.
`launch.run_ppo` runs it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.algorithms.ppo import PPO
from megatron_real.capabilities import capability_problems
from megatron_real.data_plan import Lengths, assign
from megatron_real.dataflow import Graph
from megatron_real.errors import ConfigError, raise_problems
from megatron_real.hooks import checkpoint, cpu_device, roles
from megatron_real.hooks.megatron_backend import RoleSetup, check_copies
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.model_copy import Training, require_droppable, require_state_movable
from megatron_real.hooks.replan import check_change, copy_changes
from megatron_real.hooks.tokenizer import build_tokenizer
from megatron_real.hooks.training_state import require_movable
from megatron_real.plan import Plan
from megatron_real.program import Program, compile_program
from megatron_real.runtime.faults import Fault, parse_faults, ranks_by_instruction
from megatron_real.runtime.prompts import PromptOptions, Prompts, Tokenizer
from megatron_real.runtime.rewards import load_function
from megatron_real.runtime.run_state import state_to_resume

if TYPE_CHECKING:
    from megatron_real.config import RunOptions

__all__ = ["Job", "prepare"]

_SCALAR_HEADS = ("critic", "reward")
_INIT_SEED_OFFSET = {"critic": 1, "reward": 2}
"""Fresh critics and reward models differ from the actor; the reference equals it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run whose input was checked; nothing collective has happened."""

    options: RunOptions
    program: Program
    """Of the first iteration that is run."""
    later: Mapping[int, Program]
    """Programs that take its place, by their first iteration."""
    algorithm: PPO
    tokenizer: Tokenizer
    prompts: Prompts
    roles: Mapping[str, RoleSetup]
    loads: Mapping[str, Path]
    """Iteration folders of the roles' checkpoints."""
    faults: tuple[Fault, ...]
    resume: Mapping[str, Any] | None
    """The run's state at its last save."""

    @property
    def save_folder(self) -> Path:
        return self.options.output / "checkpoints"

    @property
    def first_iteration(self) -> int:
        return int(self.resume["iteration"]) if self.resume is not None else 0


def prepare(options: RunOptions) -> Job:
    """Read and check everything that a run needs. No collective; the same on every rank.

    Raises:
        RealError: the plan, an option or a file is wrong.
    """
    function = load_function(options.reward) if options.reward is not None else None
    config = options.ppo_config()
    graph = ppo_graph("function" if function is not None else "model", reference=config.reference)
    state = state_to_resume(options.output, resume=options.resume)
    programs = _programs(options, graph)
    base = roles.parse_arguments(options.megatron, options.plan)
    tokenizer = build_tokenizer(base)
    algorithm = PPO(config, tokenizer.end_token, function)
    setups, loads = _roles(options, list(programs.values()), base, algorithm)
    for start, program in programs.items():
        _check_program(program, str(_plan_paths(options)[start]), setups)
        _check_batch(program, algorithm, options.data.batch_size)
    first = int(state["iteration"]) if state is not None else 0
    program = programs[max(start for start in programs if start <= first)]
    prompts = Prompts.load(
        options.data.prompts,
        tokenizer,
        PromptOptions(
            batch_size=options.data.batch_size,
            max_prompt_tokens=options.data.max_prompt_tokens,
            truncate=options.data.truncate,
            seed=options.seed,
        ),
    )
    _check_lengths(setups, prompts, config.max_new_tokens)
    return Job(
        options=options,
        program=program,
        later={start: later for start, later in programs.items() if start > first},
        algorithm=algorithm,
        tokenizer=tokenizer,
        prompts=prompts,
        roles=setups,
        loads=loads,
        faults=parse_faults(
            options.fault,
            names=ranks_by_instruction(program),
            world_size=program.world_size,
            num_iterations=options.iterations,
        ),
        resume=_checked_resume(options, state, program, setups),
    )


def _plan_paths(options: RunOptions) -> dict[int, Path]:
    """The plans of the run, by their first iteration."""
    following = options.next_plan
    return {0: options.plan, **({following.iteration: following.plan} if following is not None else {})}


def _programs(options: RunOptions, graph: Graph) -> dict[int, Program]:
    """The programs of the run's plans, by their first iteration."""
    plans = {start: Plan.load(path) for start, path in _plan_paths(options).items()}
    for start, plan in plans.items():
        if start > 0:
            check_change(plans[0], plan, source=str(_plan_paths(options)[start]))
    return {start: compile_program(graph, plan) for start, plan in plans.items()}


def _check_program(program: Program, source: str, setups: Mapping[str, RoleSetup]) -> None:
    """Whether the models can be cut as the plan says."""
    shapes = {name: setup.model.shape() for name, setup in setups.items()}
    program.plan.check(program.graph, shapes, source=source)
    raise_problems(capability_problems(program.graph, program.plan), subject=source)
    check_copies(program, setups)


def _roles(
    options: RunOptions, programs: Sequence[Program], base: Namespace, algorithm: PPO
) -> tuple[dict[str, RoleSetup], dict[str, Path]]:
    program = programs[0]
    setups: dict[str, RoleSetup] = {}
    loads: dict[str, Path] = {}
    for name in options.model:
        if name not in program.graph.models:
            raise ConfigError(
                f"model.{name}: found a role that the algorithm does not have; it has {list(program.graph.models)}."
            )
    num_steps = options.iterations * algorithm.config.num_minibatches * algorithm.config.num_epochs
    for name in program.graph.models:
        role = options.role(name)
        folder = role.load if role.load is not None or name != "ref" else options.role("actor").load
        stored = None
        if folder is not None:
            loads[name] = checkpoint.find_checkpoint(folder)
            stored = checkpoint.read_common(loads[name]).get("args")
        own_shape = name != "actor" and role.load is not None  # the command line describes the actor
        args = roles.role_arguments(
            base, stored=stored if own_shape else None, overrides=role.megatron, role=name
        )
        if stored is not None:
            checkpoint.check_architecture(name, args, stored, loads[name])
        model = roles.role_model(
            name,
            args,
            scalar_head=name in _SCALAR_HEADS,
            tp_sizes=[placement.layout.tp for each in programs for placement in each.plan.calls.values()],
            seed=options.seed + _INIT_SEED_OFFSET.get(name, 0),
            use_te=args.transformer_impl == "transformer_engine" and not cpu_device.is_active(),
        )
        if name in loads:
            checkpoint.check_tensors(model, loads[name])
        trained = program.graph.trained(name)
        optimizer = roles.optimizer_config(name, args) if trained else None
        if optimizer is not None:
            _check_training(name, model, Training(optimizer=optimizer), programs)
        setups[name] = RoleSetup(
            model=model,
            args=args,
            optimizer=optimizer,
            schedule=roles.learning_schedule(name, args, num_steps) if trained else None,
        )
    return setups, loads


def _check_training(name: str, model: RoleModel, training: Training, programs: Sequence[Program]) -> None:
    """Whether a trained model can be dropped and moved as the plans say."""
    home_call = programs[0].graph.home_call(name).name
    if any(program.plan.calls[home_call].drop_trained_weights for program in programs):
        require_droppable(model, training)
    if any(program.plan.calls[home_call].offload == "host" for program in programs):
        require_state_movable(model, training)
    if any(copy_changes(name, programs[0], program).moves for program in programs[1:]):
        require_movable(model, training)


def _check_batch(program: Program, algorithm: PPO, batch_size: int) -> None:
    """Whether every call can cut the batch, whatever the lengths will be."""
    lengths = Lengths(prompt=(1,) * batch_size, response=(1,) * batch_size)
    for call in program.graph.calls:
        num_minibatches = algorithm.minibatching(call).num_minibatches if call.trains else 1
        assign(call, program.plan.calls[call.name], lengths, num_minibatches)


def _check_lengths(setups: Mapping[str, RoleSetup], prompts: Prompts, max_new_tokens: int) -> None:
    longest = max(len(record.tokens) for record in prompts.records) + max_new_tokens
    for name, setup in setups.items():
        limit = setup.model.max_sequence_length
        if longest > limit:
            raise ConfigError(
                f"{name}: found sequences of up to {longest} tokens (longest prompt and "
                f"max_new_tokens={max_new_tokens}); expected at most --max-position-embeddings={limit}."
            )


def _checked_resume(
    options: RunOptions, state: dict[str, Any] | None, program: Program, setups: Mapping[str, RoleSetup]
) -> dict[str, Any] | None:
    if state is None:
        return None
    folder = options.output / "checkpoints"
    for model in program.graph.models:
        if program.graph.trained(model):
            found = checkpoint.find_checkpoint(folder / model, int(state["iteration"]))
            checkpoint.check_tensors(setups[model].model, found)
    return state
