"""Reward functions for the examples: ``(prompts, responses, **columns) -> list[float]``.

`right_answer` and `answer_format` check answers by rule. The data has the right answer of each prompt in the column
``answer``::

    {"prompt": "What is 17 + 25? Answer as <answer>number</answer>. ", "answer": 42}

and the run takes both functions, format at a tenth of the weight, in two processes per rank::

    megatron-real train ... '++reward.functions=[rewards:right_answer,{function: rewards:answer_format, weight: 0.1}]' \
        ++reward.processes=2 ++reward.timeout_s=5
"""

from __future__ import annotations

import re
from fractions import Fraction

TARGET_SHARE = 0.6
"""Share of vowels at which `vowel_share` is highest. English text has about 0.3, so the start is away from it, and text
of nothing but vowels scores no better than text with few."""

_VOWELS = frozenset("aeiou")
_ANSWER = re.compile(r"<answer>([^<>]{1,64})</answer>")
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?(/\d+)?", re.ASCII)
"""``42``, ``-1,000.5``, ``3/4``."""


def vowel_share(prompts: list[str], responses: list[str], **columns: list[object]) -> list[float]:
    """One minus the distance between the response's share of vowels and `TARGET_SHARE`, scaled to [0, 1].

    The optimum lies inside the range, at 60 % vowels: neither end of it is best.
    """
    return [1.0 - abs(_share(text) - TARGET_SHARE) / TARGET_SHARE for text in responses]


def _share(text: str) -> float:
    return sum(letter in _VOWELS for letter in text.lower()) / max(len(text), 1)


def right_answer(
    prompts: list[str], responses: list[str], answer: list[object], **columns: list[object]
) -> list[float]:
    """1 if the response gives the number `answer`, between ``<answer>`` and ``</answer>`` and only once, else 0.

    Numbers are compared exactly: 0.50 is 1/2, and 0.333 is not 1/3.
    """
    return [
        float(given is not None and given == _number(str(right)))
        for given, right in zip(map(_given, responses), answer, strict=True)
    ]


def answer_format(prompts: list[str], responses: list[str], **columns: list[object]) -> list[float]:
    """1 if the response gives a number in that form, right or wrong, else 0."""
    return [float(_given(response) is not None) for response in responses]


def _given(response: str) -> Fraction | None:
    """The number that a response gives as its answer; None if there is none, or more than one answer."""
    answers = _ANSWER.findall(response)
    return _number(answers[0]) if len(answers) == 1 else None


def _number(text: str) -> Fraction | None:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    whole, _, parts = text.replace(",", "").partition("/")
    if parts and not int(parts):
        return None
    return Fraction(whole) / int(parts or 1)
