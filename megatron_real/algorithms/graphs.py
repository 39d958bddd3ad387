"""The dataflow graphs of the algorithms. No torch: `show`, `search` and the presets read them.

A train call takes tokens of its own sequences only, but the scalars of *all* sequences: advantages are
whitened over the whole batch, and each train call derives them itself instead of waiting for another.
"""

from __future__ import annotations

from typing import Literal

from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.errors import PlanError

__all__ = ["ppo_graph"]


def ppo_graph(reward: Literal["model", "function"] = "model", *, reference: bool = True) -> Graph:
    """PPO's calls: generate, score, three inferences, two trainings.

    Args:
        reward: whether ``rew_inf`` is a call of the model ``reward`` or of a Python function.
        reference: whether there is a reference model to hold the actor to (``ref_inf``).

    Raises:
        PlanError: `reward` is neither.
    """
    if reward not in ("model", "function"):
        raise PlanError(f"graph ppo: found reward={reward!r}; expected 'model' or 'function'.")
    scalars = ["logprobs", *(["ref_logprobs"] if reference else []), "values", "rewards"]
    tokens = (Input(key="tokens"),)
    train_inputs = (*tokens, *(Input(key=key, scope=Scope.FULL) for key in scalars))
    ref_inf = Call(
        name="ref_inf", model="ref", type=CallType.INFERENCE, inputs=tokens, outputs=("ref_logprobs",)
    )
    calls = (
        Call(name="actor_gen", model="actor", type=CallType.GENERATE, outputs=("tokens", "logprobs")),
        Call(
            name="rew_inf",
            model="reward" if reward == "model" else None,
            type=CallType.INFERENCE,
            inputs=tokens,
            outputs=("rewards",),
        ),
        *((ref_inf,) if reference else ()),
        Call(name="critic_inf", model="critic", type=CallType.INFERENCE, inputs=tokens, outputs=("values",)),
        Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=train_inputs),
        Call(name="critic_train", model="critic", type=CallType.TRAIN, inputs=train_inputs),
    )
    keys = (
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="logprobs", per=Per.RESPONSE, dtype="float32"),
        *((KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32"),) if reference else ()),
        KeySpec(name="values", per=Per.RESPONSE, dtype="float32"),
        KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"),
    )
    return Graph(name="ppo", calls=calls, keys=keys)
