"""A small task with a true rule: write a word in capitals. What ``make learn`` and ``make rlhf`` train on.

A prompt asks for a word of six letters, as in ``now write sdkamt>``; the answer wanted is the word in capitals, and
`score` says how close a response is. Text to pretrain on is by a `Writer` who uses capitals now and then and makes
mistakes, so a model of it scores some points and is far from all. No word to pretrain on is one to train on.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CAREFUL",
    "CARELESS",
    "END_OF_TEXT",
    "FAIR",
    "LETTERS",
    "Writer",
    "answers",
    "pairs",
    "prompts",
    "score",
    "text",
    "words",
    "write_lines",
]

END_OF_TEXT = 256
"""The byte tokenizer's token after an answer."""
LETTERS = 6
"""Of a word."""
REQUESTS = ("", "say ", "write ", "now write ")
"""What stands before a word, so that prompts differ in length."""


def score(prompts: list[str], responses: list[str], **columns: list[object]) -> list[float]:
    """The true rule: the share of places where the response has the prompt's letter, as a capital.

    Places that only one of the two has count as wrong, so neither a short nor a long response is a way out.
    """
    wanted = [prompt[-LETTERS - 1 : -1].upper() for prompt in prompts]
    return [_share_right(word, text) for word, text in zip(wanted, responses, strict=True)]


def _share_right(wanted: str, found: str) -> float:
    right = sum(a == b for a, b in zip(wanted, found, strict=False))
    return right / max(len(wanted), len(found), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes answers: the chances, per letter, of what may happen to it."""

    capital: float
    wrong: float = 0.0
    """Another letter of the alphabet."""
    dropped: float = 0.0
    doubled: float = 0.0

    def answer(self, word: str, dice: random.Random) -> str:
        """The word as this writer writes it."""
        return "".join(self._letter(letter, dice) for letter in word)

    def _letter(self, letter: str, dice: random.Random) -> str:
        if dice.random() < self.wrong:
            letter = dice.choice(string.ascii_lowercase)
        if dice.random() < self.capital:
            letter = letter.upper()
        chance = dice.random()
        times = 0 if chance < self.dropped else 2 if chance > 1.0 - self.doubled else 1
        return letter * times


CARELESS = Writer(capital=0.3, wrong=0.03, dropped=0.01, doubled=0.01)
"""Of the text to pretrain on."""
CAREFUL = Writer(capital=0.95, wrong=0.01)
"""Of demonstrations that are nearly all right."""
FAIR = Writer(capital=0.6, wrong=0.03, dropped=0.01, doubled=0.01)
"""Of demonstrations: better than `CARELESS`, and with room above."""


def words(seed: int, *, held_out: bool) -> Iterator[str]:
    """Words without end, each once; no letter is twice in a word.

    Args:
        seed: of the order.
        held_out: a quarter of all words is held out of what is pretrained on, whatever the seed.
    """
    dice = random.Random(seed)
    seen: set[str] = set()
    while True:
        word = "".join(dice.sample(string.ascii_lowercase, LETTERS))
        if word not in seen and (zlib.crc32(word.encode()) % 4 == 0) == held_out:
            seen.add(word)
            yield word


def _prompt(word: str, dice: random.Random) -> str:
    return f"{dice.choice(REQUESTS)}{word}>"


def text(chosen: Iterable[str], writer: Writer, seed: int) -> Iterator[int]:
    """Tokens of prompts and answers, each closed by `END_OF_TEXT`."""
    dice = random.Random(seed)
    for word in chosen:
        yield from (_prompt(word, dice) + writer.answer(word, dice)).encode()
        yield END_OF_TEXT


def prompts(chosen: Iterable[str], seed: int) -> Iterator[dict[str, str]]:
    """Records of prompts."""
    dice = random.Random(seed)
    return ({"prompt": _prompt(word, dice)} for word in chosen)


def answers(chosen: Iterable[str], writer: Writer, seed: int) -> Iterator[dict[str, str]]:
    """Records of prompts with an answer."""
    dice = random.Random(seed)
    return ({"prompt": _prompt(word, dice), "answer": writer.answer(word, dice)} for word in chosen)


def pairs(chosen: Iterable[str], writer: Writer, seed: int) -> Iterator[dict[str, str]]:
    """Records of preference pairs: two answers of one writer, of which the true rule prefers the first."""
    dice = random.Random(seed)
    for word in chosen:
        prompt, first, second = _prompt(word, dice), writer.answer(word, dice), writer.answer(word, dice)
        points = score([prompt, prompt], [first, second])
        while points[0] == points[1]:
            second = writer.answer(word, dice)
            points = score([prompt, prompt], [first, second])
        if points[0] < points[1]:
            first, second = second, first
        yield {"prompt": prompt, "chosen": first, "rejected": second}


def write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
