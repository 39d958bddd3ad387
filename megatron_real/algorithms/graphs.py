"""The dataflow graphs of the algorithms. No torch: `show`, `search` and the presets read them.

A train call takes tokens of its own sequences only, but of what its advantages are made of *all* sequences: advantages
are whitened over the whole batch, and each train call derives them itself instead of waiting for another. What a data
set holds (prompts, preference pairs: `Graph.data`) is no key: every call reads its part of it.

A reference need not stay what it was: with ``reference_ema`` it takes that share of the difference to the actor at the
end of every ``reference_ema_every``-th iteration (an exponential moving average of the actor; 1 copies it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from megatron_real.dataflow import SAMPLES, Call, CallType, Graph, Input, KeySpec, Per, Scope, Update
from megatron_real.errors import PlanError

__all__ = [
    "dpo_graph",
    "graph_of",
    "grpo_graph",
    "ppo_graph",
    "reinforce_pp_graph",
    "remax_graph",
    "reward_graph",
    "rloo_graph",
    "sft_graph",
]

_GREEDY = "greedy"
"""The set of ReMax's greedy responses."""

_TOKENS = (Input(key="tokens"),)
_PER = {
    "tokens": Per.TOKEN,
    "greedy_tokens": Per.TOKEN,
    "logprobs": Per.RESPONSE,
    "ref_logprobs": Per.RESPONSE,
    "values": Per.RESPONSE,
    "rewards": Per.SEQUENCE,
    "greedy_rewards": Per.SEQUENCE,
}


def ppo_graph(
    reward: Literal["model", "function"] = "model",
    *,
    reference: bool = True,
    reference_ema: float = 0.0,
    reference_ema_every: int = 1,
    extra_rewards: int = 0,
) -> Graph:
    """PPO's calls: generate, score, three inferences, two trainings.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model to hold the actor to (``ref_inf``).
        reference_ema: see the module.
        reference_ema_every: the same.
        extra_rewards: further frozen reward models: ``rew2_inf`` of the model ``reward2`` makes ``rewards2``, and so
            on. For studies of the search on larger graphs; `algorithms.ppo` trains on the first one.

    Raises:
        PlanError: `reward` is neither, there is no reference to move, or `extra_rewards` is negative.
    """
    if extra_rewards < 0:
        raise PlanError(f"graph ppo: found extra_rewards={extra_rewards}; expected at least 0.")
    extra = range(2, 2 + extra_rewards)
    scalars = [
        "logprobs",
        *(["ref_logprobs"] if reference else []),
        "values",
        "rewards",
        *(f"rewards{number}" for number in extra),
    ]
    train_inputs = (*_TOKENS, *_full(scalars))
    calls = (
        _generation(),
        _scoring("rew_inf", _reward_model("ppo", reward), "tokens", "rewards"),
        *(_scoring(f"rew{number}_inf", f"reward{number}", "tokens", f"rewards{number}") for number in extra),
        *(_reference() if reference else ()),
        _scoring("critic_inf", "critic", "tokens", "values"),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=train_inputs),
        Call(name="critic_train", model="critic", type=CallType.TRAIN, inputs=train_inputs),
    )
    return Graph(
        name="ppo",
        calls=calls,
        keys=_keys(["tokens", *scalars]),
        updates=_moving("ppo", reference, reference_ema, reference_ema_every),
        scalar_heads=("critic",),
    )


def grpo_graph(
    reward: Literal["model", "function"] = "model",
    *,
    reference: bool = True,
    reference_ema: float = 0.0,
    reference_ema_every: int = 1,
) -> Graph:
    """GRPO's calls (arXiv:2402.03300): generate groups, score, hold to the reference in the loss, train.

    The group's rewards make the advantage, so rewards of all sequences are needed; log-probabilities only of the
    rank's own.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``).
        reference_ema: see the module.
        reference_ema_every: the same.

    Raises:
        PlanError: `reward` is neither, or there is no reference to move.
    """
    updates = _moving("grpo", reference, reference_ema, reference_ema_every)
    return _without_critic("grpo", reward, updates, reference=reference, penalised=False)


def rloo_graph(
    reward: Literal["model", "function"] = "model",
    *,
    reference: bool = True,
    reference_ema: float = 0.0,
    reference_ema_every: int = 1,
) -> Graph:
    """RLOO's calls (arXiv:2402.14740): generate groups, score, train; the other rewards of a group are the baseline.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``); it enters the reward, of all sequences.
        reference_ema: see the module.
        reference_ema_every: the same.

    Raises:
        PlanError: `reward` is neither, or there is no reference to move.
    """
    updates = _moving("rloo", reference, reference_ema, reference_ema_every)
    return _without_critic("rloo", reward, updates, reference=reference, penalised=reference)


def reinforce_pp_graph(
    reward: Literal["model", "function"] = "model",
    *,
    reference: bool = True,
    reference_ema: float = 0.0,
    reference_ema_every: int = 1,
) -> Graph:
    """REINFORCE++'s calls (arXiv:2501.03262): as RLOO's; advantages are normalised over the whole batch.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``); it enters the reward, of all sequences.
        reference_ema: see the module.
        reference_ema_every: the same.

    Raises:
        PlanError: `reward` is neither, or there is no reference to move.
    """
    updates = _moving("reinforce_pp", reference, reference_ema, reference_ema_every)
    return _without_critic("reinforce_pp", reward, updates, reference=reference, penalised=reference)


def remax_graph(
    reward: Literal["model", "function"] = "model",
    *,
    reference: bool = False,
    reference_ema: float = 0.0,
    reference_ema_every: int = 1,
) -> Graph:
    """ReMax's calls (arXiv:2310.10505): sampled and greedy responses to the same prompts, both scored, one training.

    The greedy response's reward is the baseline of the sampled one's. Nothing passes between the two generations,
    nor between the two scorings: they may run at the same time, each on a copy of its own.

    Args:
        reward: whether ``rew_inf`` and ``greedy_rew_inf`` are calls of the model ``reward`` or of a Python function.
        reference: whether there is a reference model (``ref_inf``); it enters the reward, of all sequences.
        reference_ema: see the module.
        reference_ema_every: the same.

    Raises:
        PlanError: `reward` is neither, or there is no reference to move.
    """
    model = _reward_model("remax", reward)
    rewards = ["rewards", "greedy_rewards"]
    calls = (
        # First: a realloc keeps its source's ranks, and it is the sampling that may stay where the actor lives.
        Call(
            name="greedy_gen",
            model="actor",
            type=CallType.GENERATE,
            outputs=("greedy_tokens",),
            sequences=_GREEDY,
        ),
        _generation(),
        _scoring("rew_inf", model, "tokens", "rewards"),
        _scoring("greedy_rew_inf", model, "greedy_tokens", "greedy_rewards", sequences=_GREEDY),
        *(_reference() if reference else ()),
        _policy_training(rewards, reference=reference, penalised=reference),
    )
    return Graph(
        name="remax",
        calls=calls,
        keys=_keys(["tokens", "greedy_tokens", *_policy_keys(reference=reference), *rewards]),
        updates=_moving("remax", reference, reference_ema, reference_ema_every),
    )


def dpo_graph(*, reference_ema: float = 0.0, reference_ema_every: int = 1) -> Graph:
    """DPO's calls (arXiv:2305.18290): the reference's log-probabilities of the data set's pairs, then the training.

    Args:
        reference_ema: see the module; TR-DPO (arXiv:2404.09656).
        reference_ema_every: the same.
    """
    calls = (
        Call(name="ref_inf", model="ref", type=CallType.INFERENCE, outputs=("ref_logprobs",)),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=(Input(key="ref_logprobs"),)),
    )
    updates = _moving("dpo", True, reference_ema, reference_ema_every)
    return Graph(name="dpo", calls=calls, keys=_keys(["ref_logprobs"]), updates=updates, pairs=True)


def sft_graph() -> Graph:
    """Supervised fine-tuning: one training on the data set's sequences."""
    return Graph(name="sft", calls=(Call(name="actor_train", model="actor", type=CallType.TRAIN),), keys=())


def reward_graph() -> Graph:
    """Training a reward model: one training on the data set's pairs."""
    call = Call(name="reward_train", model="reward", type=CallType.TRAIN)
    return Graph(name="reward", calls=(call,), keys=(), pairs=True, scalar_heads=("reward",))


def graph_of(name: str, **options: Any) -> Graph:
    """The graph of an algorithm.

    Args:
        name: as in a plan's ``algorithm``; ``module:ATTRIBUTE`` imports the user's module.
        options: of that algorithm's function, such as ``reference=False``.

    Raises:
        ConfigError: no such algorithm, or an option that it does not have.
        PlanError: an option is not one of its values.
    """
    from megatron_real.algorithms.registry import find_algorithm  # it knows the functions above

    return find_algorithm(name).graph_of(**options)


def _generation() -> Call:
    return Call(name="actor_gen", model="actor", type=CallType.GENERATE, outputs=("tokens", "logprobs"))


def _scoring(name: str, model: str | None, tokens: str, output: str, *, sequences: str = SAMPLES) -> Call:
    return Call(
        name=name,
        model=model,
        type=CallType.INFERENCE,
        inputs=(Input(key=tokens),),
        outputs=(output,),
        sequences=sequences,
    )


def _reference() -> tuple[Call, ...]:
    return (_scoring("ref_inf", "ref", "tokens", "ref_logprobs"),)


def _moving(graph: str, reference: bool, share: float, every: int) -> tuple[Update, ...]:
    """The reference's way toward the actor."""
    if share == 0.0:
        return ()
    if not reference:
        raise PlanError(f"graph {graph}: found reference_ema={share} without a reference; expected 0.")
    return (Update(target="ref", source="actor", mix=share, every=every),)


def _without_critic(
    name: str, reward: str, updates: tuple[Update, ...], *, reference: bool, penalised: bool
) -> Graph:
    """Generate, score, train."""
    calls = (
        _generation(),
        _scoring("rew_inf", _reward_model(name, reward), "tokens", "rewards"),
        *(_reference() if reference else ()),
        _policy_training(["rewards"], reference=reference, penalised=penalised),
    )
    keys = _keys(["tokens", *_policy_keys(reference=reference), "rewards"])
    return Graph(name=name, calls=calls, keys=keys, updates=updates)


def _policy_training(rewards: list[str], *, reference: bool, penalised: bool) -> Call:
    """Where the reference enters the reward, a penalty is a part of each, so all log-probabilities are needed."""
    policy = _policy_keys(reference=reference)
    inputs = _full(policy) if penalised else tuple(Input(key=key) for key in policy)
    return Call(
        name="actor_train", model="actor", type=CallType.TRAIN, inputs=(*_TOKENS, *inputs, *_full(rewards))
    )


def _policy_keys(*, reference: bool) -> list[str]:
    return ["logprobs", *(["ref_logprobs"] if reference else [])]


def _reward_model(graph: str, reward: str) -> str | None:
    if reward not in ("model", "function"):
        raise PlanError(f"graph {graph}: found reward={reward!r}; expected 'model' or 'function'.")
    return "reward" if reward == "model" else None


def _full(keys: Iterable[str]) -> tuple[Input, ...]:
    return tuple(Input(key=key, scope=Scope.FULL) for key in keys)


def _keys(names: Iterable[str]) -> tuple[KeySpec, ...]:
    specs = []
    for name in names:
        per = _PER[name.rstrip("0123456789")]
        dtype = "int64" if per is Per.TOKEN else "float32"
        sequences = _GREEDY if name.startswith("greedy_") else SAMPLES
        specs.append(KeySpec(name=name, per=per, dtype=dtype, sequences=sequences))
    return tuple(specs)
