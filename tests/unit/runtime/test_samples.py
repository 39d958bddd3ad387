"""Sequences to read: lines, what ranks tell of one sequence together, resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatron_real.runtime.reports.samples import SampleWriter


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().split("\n") if line]


def test_what_is_told_of_a_sequence_is_a_line(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(
        4,
        "training",
        {
            "10/rew_inf": {"prompt": "Wie heißt …\u2028?", "response": "Paris", "rewards": 1.0},
            "2/rew_inf": {"prompt": "a", "response": "b", "rewards": math.nan},
            "2/greedy_rew_inf": {"prompt": "a", "greedy_response": "c", "greedy_rewards": 0.5},
        },
    )
    writer.close()
    head = {"iteration": 4, "of": "training"}
    assert lines(tmp_path) == [
        {
            **head,
            "sequence": 2,
            "prompt": "a",
            "response": "b",
            "rewards": None,
            "greedy_response": "c",
            "greedy_rewards": 0.5,
        },
        {**head, "sequence": 10, "prompt": "Wie heißt …\u2028?", "response": "Paris", "rewards": 1.0},
    ]
    assert "Wie heißt" in (tmp_path / "samples.jsonl").read_text(), "to be read by people"


def test_a_resumed_run_writes_its_iterations_anew(tmp_path: Path) -> None:
    def told(text: str) -> dict[str, Any]:
        return {"0/rew_inf": {"prompt": "p", "response": text, "rewards": 0.0}}

    writer = SampleWriter(tmp_path)
    for iteration in range(4):
        writer.write(iteration, "training", told(f"first {iteration}"))
    writer.close()
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"iteration": 4, "prompt": "ü'.encode()[:-1])  # killed inside a character
    writer = SampleWriter(tmp_path, first_iteration=2)
    for iteration in range(2, 4):
        writer.write(iteration, "training", told(f"again {iteration}"))
    writer.close()
    assert [(line["iteration"], line["response"]) for line in lines(tmp_path)] == [
        (0, "first 0"),
        (1, "first 1"),
        (2, "again 2"),
        (3, "again 3"),
    ]
