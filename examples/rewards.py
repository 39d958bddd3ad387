"""Reward functions for the examples: ``(prompts, responses, **columns) -> list[float]``."""

from __future__ import annotations

TARGET_SHARE = 0.6
"""Share of vowels at which `vowel_share` is highest. English text has about 0.3, so the start is away from it, and text
of nothing but vowels scores no better than text with few."""

_VOWELS = frozenset("aeiou")


def vowel_share(prompts: list[str], responses: list[str], **columns: list[object]) -> list[float]:
    """One minus the distance between the response's share of vowels and `TARGET_SHARE`, scaled to [0, 1].

    The optimum lies inside the range, at 60 % vowels: neither end of it is best.
    """
    return [1.0 - abs(_share(text) - TARGET_SHARE) / TARGET_SHARE for text in responses]


def _share(text: str) -> float:
    return sum(letter in _VOWELS for letter in text.lower()) / max(len(text), 1)
