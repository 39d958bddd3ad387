"""``megatron-real plan symmetric|split``: write a plan without a search. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_real.algorithms.graphs import graph_of
from megatron_real.algorithms.registry import ALGORITHMS
from megatron_real.dataflow import Graph
from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search.presets import split, symmetric

__all__ = ["PRESETS", "cluster_spec", "main", "preset_plan"]

PRESETS = ("symmetric", "split")


def main(argv: list[str]) -> int:
    """Write the plan to --output, or print it."""
    parser = argparse.ArgumentParser(prog="megatron-real plan", description="Write a plan without a search.")
    parser.add_argument(
        "preset", choices=PRESETS, help="one layout for all calls, or actor+ref and the rest on two halves"
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices-per-node", type=int, required=True)
    parser.add_argument("--device", default="cpu", help="a name for the kind of device (default: cpu)")
    parser.add_argument("--device-memory", type=int, metavar="BYTES", help="what a rank may own at once")
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="[NAME=]LAYOUT",
        help="such as d1t2p2; for split with the name of a call or a model, such as actor=d1t2p1. May be repeated",
    )
    parser.add_argument("--num-microbatches", type=int)
    parser.add_argument(
        "--algorithm", default="ppo", metavar="NAME", help=f"{', '.join(ALGORITHMS)}, or module:ATTRIBUTE"
    )
    parser.add_argument(
        "--reward", choices=("model", "function"), help="what scores responses (default: model)"
    )
    parser.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        help="whether there is a reference model (default: as the algorithm's options have it)",
    )
    parser.add_argument("--output", "-o", type=Path, metavar="PLAN.JSON")
    args = parser.parse_args(argv)
    given = {"reward": args.reward, "reference": args.reference}
    graph = graph_of(args.algorithm, **{name: value for name, value in given.items() if value is not None})
    cluster = cluster_spec(
        {
            "num_nodes": args.nodes,
            "devices_per_node": args.devices_per_node,
            "device": args.device,
            "device_memory": args.device_memory,
        },
        source="plan",
        names={name: f"--{name.removeprefix('num_').replace('_', '-')}" for name in ClusterSpec.model_fields},
    )
    plan = preset_plan(
        args.preset, graph, cluster, layouts=args.layout, num_microbatches=args.num_microbatches
    )
    if args.output is None:
        print(plan.dumps(), end="")
    else:
        try:
            plan.dump(args.output)
        except OSError as error:
            raise ConfigError(
                f"--output: {args.output}: cannot be written ({error.strerror}). Give a file in a folder that exists."
            ) from error
    return 0


def cluster_spec(
    values: Mapping[str, Any], *, source: str, names: Mapping[str, str] | None = None
) -> ClusterSpec:
    """A cluster from options.

    Args:
        values: by field of `ClusterSpec`.
        source: what errors begin with.
        names: how the user knows the fields; None calls them ``cluster.FIELD``.

    Raises:
        ConfigError: listing the values that cannot be.
    """
    try:
        return ClusterSpec(**values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            field = ".".join(map(str, item["loc"]))
            path = names[field] if names is not None else f"cluster.{field}"
            problems.append(Problem(path=path, found=repr(item["input"]), expected=item["msg"]))
        raise_problems(problems, subject=source, error=ConfigError)
        raise AssertionError("a validation error without problems") from error


def preset_plan(
    preset: str,
    graph: Graph,
    cluster: ClusterSpec,
    *,
    layouts: Sequence[str] = (),
    num_microbatches: int | None = None,
) -> Plan:
    """The plan of a preset.

    Args:
        layouts: for ``symmetric`` at most one layout; for ``split`` texts ``NAME=LAYOUT``.

    Raises:
        ConfigError: the layouts are not of that form.
        PlanError: they do not fit.
    """
    if preset == "symmetric":
        if len(layouts) > 1 or any("=" in text for text in layouts):
            raise ConfigError(
                f"--layout: found {', '.join(layouts)}; expected one layout without a name for symmetric."
            )
        return symmetric(graph, cluster, layout=next(iter(layouts), None), num_microbatches=num_microbatches)
    named = dict(text.partition("=")[::2] for text in layouts)
    if not all(named.values()):
        raise ConfigError(
            f"--layout: found {', '.join(layouts)}; expected NAME=LAYOUT for split, such as actor=d1t2p1."
        )
    return split(graph, cluster, layouts=named or None, num_microbatches=num_microbatches)
