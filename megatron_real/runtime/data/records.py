"""From the lines of a data set to token sequences: which keys a line has, what they may be, and how long.

    prompts     {"prompt": ..., columns}
    answers     {"prompt": ..., "answer": ..., columns}, or {"messages": [...], columns}: the last message is the answer
    pairs       {"prompt": ..., "chosen": ..., "rejected": ..., columns}; the column "margin", if any, holds numbers

A prompt is a text, or a list of chat messages, which go through the chat template; a text is taken as it is. An answer
is a text, or a list of one message of the assistant. An answer's tokens are those of its text and the end token: what
a model generates in the place where the prompt's template ends.

Other keys are columns. All lines have the same ones, since reward functions get them by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from megatron_real.dataflow import DataKind
from megatron_real.errors import ConfigError, Problem
from megatron_real.runtime.data.chat_templates import Message, load_template
from megatron_real.runtime.data.readers import Line
from megatron_real.runtime.data.tokenization import Tokenizer

__all__ = ["DatasetOptions", "Record", "RecordMaker"]

_ANSWERS = {DataKind.PROMPTS: (), DataKind.ANSWERS: ("answer",), DataKind.PAIRS: ("chosen", "rejected")}
"""The keys of the answers in a line of each kind: each makes one sequence."""
_MESSAGES, _MARGIN = "messages", "margin"
_RESERVED = ("prompts", "responses")
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """How a data set is read and dealt out."""

    kind: DataKind = DataKind.PROMPTS
    batch_size: int
    """Lines (prompts, answers or pairs) per iteration."""
    samples_per_prompt: int = 1
    """How often a line is repeated in a batch, with consecutive sequence ids."""
    max_prompt_tokens: int
    max_answer_tokens: int = 512
    """The end token included."""
    truncate: bool = False
    """Cut what is longer: a prompt keeps its last tokens, an answer its first ones; otherwise it is an error."""
    append_end: bool = True
    """Whether the end token follows an answer that does not end with it. A cut answer has none."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a key -> its name in the data set, where it differs. Our name hides a column that has it too."""
    chat_template: str | None = None
    """Jinja text, or the path of its file, for prompts of chat messages; None takes the tokenizer's own."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sequence of the data set: a prompt, with an answer or without."""

    text: str
    """Of the prompt."""
    tokens: tuple[int, ...]
    """Of the prompt."""
    columns: Mapping[str, Any]
    response: tuple[int, ...] = ()
    """Tokens of the answer; none where it is to be generated."""


class _BadLineError(Exception):
    """What is wrong with a line."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found}; expected {expected}")
        self.found, self.expected = found, expected


class RecordMaker:
    """Makes records from lines and collects what is wrong with them.

    Args:
        source: names the data set in messages.
        tokenizer: of the run.
        options: what a line is, and how long it may be.

    Raises:
        ConfigError: the chat template is none.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, options: DatasetOptions) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._options = options
        self._template = load_template(options.chat_template) if options.chat_template is not None else None
        self._problems: list[Problem] = []
        self._columns: tuple[str, frozenset[str]] | None = None

    def problems(self) -> Iterator[Problem]:
        """The first problems, and how many more there are."""
        yield from self._problems[:_SHOWN_PROBLEMS]
        more = len(self._problems) - _SHOWN_PROBLEMS
        if more > 0:
            yield Problem(path=self._source, found=f"{more} more bad lines", expected="none")

    def records(self, line: Line | Problem) -> tuple[Record, ...]:
        """The sequences of one line, of a pair the chosen one first; none after noting a problem.

        Raises:
            ConfigError: the prompt is a list of messages, and there is no chat template.
        """
        if isinstance(line, Problem):
            self._problems.append(line)
            return ()
        try:
            return self._make(line)
        except _BadLineError as bad:
            self._problems.append(Problem(path=line.where, found=bad.found, expected=bad.expected))
            return ()

    def _make(self, line: Line) -> tuple[Record, ...]:
        values, keys = self._renamed(line.values), _ANSWERS[self._options.kind]
        if keys == ("answer",) and _MESSAGES in values and "prompt" not in values:
            *before, last = _messages(values.pop(_MESSAGES), _MESSAGES)
            values |= {"prompt": before, "answer": [last]}
        prompt, *answers = (_taken(values, key) for key in ("prompt", *keys))
        text, tokens = self._prompt(line, prompt)
        responses = [self._response(key, answer) for key, answer in zip(keys, answers, strict=True)]
        self._check_columns(line, values)
        return tuple(
            Record(text=text, tokens=tokens, columns=values, response=response)
            for response in responses or [()]
        )

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a line under our names."""
        names = self._options.columns
        missing = [theirs for theirs in names.values() if theirs not in values]
        if missing:
            raise _BadLineError(
                f"no key {_quoted(missing[0])}", f"those that data.columns names; here are {sorted(values)}"
            )
        theirs = set(names.values())
        return {name: value for name, value in values.items() if name not in theirs} | {
            ours: values[name] for ours, name in names.items()
        }

    def _prompt(self, line: Line, value: Any) -> tuple[str, tuple[int, ...]]:
        """Text and tokens of a prompt."""
        limit = self._options.max_prompt_tokens
        if isinstance(value, str):
            text = _writable(value, "prompt")
            tokens = self._tokenizer.encode(text)
        elif isinstance(value, list):
            text = _writable(self._rendered(line, _messages(value, "prompt")), "prompt")
            tokens = self._tokenizer.encode_inside(text)
        else:
            raise _BadLineError(
                f"a prompt of type {type(value).__name__}", '"prompt": a text or a list of messages'
            )
        if not tokens:
            raise _BadLineError("an empty prompt", "at least one token")
        if len(tokens) > limit:
            self._check_truncation(f"a prompt of {len(tokens)} tokens", limit)
            tokens = tokens[-limit:]
            text = self._tokenizer.decode(tokens)
        return text, tuple(tokens)

    def _rendered(self, line: Line, messages: Sequence[Message]) -> str:
        try:
            text = self._tokenizer.render_chat(messages, self._template)
        except jinja2.TemplateError as error:
            raise _BadLineError(
                f"messages that the chat template refuses ({error})",
                "a conversation as the template writes them",
            ) from error
        if text is None:
            raise ConfigError(
                f"{self._source}: {line.where}: found a prompt of chat messages; the tokenizer has no chat template. "
                "Give data.chat_template, a Jinja text or its file, or write prompts as texts."
            )
        return text

    def _response(self, key: str, value: Any) -> tuple[int, ...]:
        """Tokens of an answer."""
        if isinstance(value, list):
            message, *more = _messages(value, key)
            if more or message["role"] != "assistant":
                found = f"{1 + len(more)} messages under {_quoted(key)}, the first of the {message['role']}"
                raise _BadLineError(
                    found, "one message of the assistant; those before it belong into the prompt"
                )
            value = message["content"]
        if not isinstance(value, str):
            raise _BadLineError(
                f"{_quoted(key)} of type {type(value).__name__}", "a text or a list of one message"
            )
        limit, end = self._options.max_answer_tokens, self._tokenizer.end_token
        tokens = self._tokenizer.encode_inside(_writable(value, key))
        if self._options.append_end and tokens[-1:] != [end]:
            tokens.append(end)
        if not tokens:
            raise _BadLineError(f"no token under {_quoted(key)}", "at least one")
        if len(tokens) > limit:
            self._check_truncation(f"{len(tokens)} tokens under {_quoted(key)}", limit)
        return tuple(tokens[:limit])

    def _check_truncation(self, found: str, limit: int) -> None:
        if not self._options.truncate:
            raise _BadLineError(found, f"at most {limit}; shorten it or allow truncation")

    def _check_columns(self, line: Line, columns: Mapping[str, Any]) -> None:
        """Whether a line has the columns of the first one, under names that a reward function can take."""
        for name in _RESERVED:
            if name in columns:
                raise _BadLineError(f"the column {name!r}", "another name: reward functions get it anyway")
        if self._options.kind is DataKind.PAIRS and _MARGIN in columns:
            margin = columns[_MARGIN]
            if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
                raise _BadLineError(f"{_quoted(_MARGIN)} {margin!r}", "a finite number")
        if self._columns is None:
            self._columns = (line.where, frozenset(columns))
        first, names = self._columns
        if names != columns.keys():
            raise _BadLineError(f"the columns {sorted(columns)}", f"{sorted(names)}, the columns of {first}")


def _taken(values: dict[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise _BadLineError(f"no key {_quoted(key)}", f"{_quoted(key)}: a text or a list of messages")
    return values.pop(key)


def _messages(value: Any, key: str) -> list[Message]:
    """A list of chat messages, at least one."""
    if not isinstance(value, list) or not value:
        raise _BadLineError(f"{_quoted(key)} without messages", "a list of them")
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(part), str) for part in ("role", "content")
        ):
            raise _BadLineError(
                f"message {number} under {_quoted(key)} without a role and content", "texts under both keys"
            )
    return value


def _writable(text: str, key: str) -> str:
    """A text that UTF-8 can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start + 1}"
        raise _BadLineError(f"{_quoted(key)} with {found}", "a text that UTF-8 can write") from error
    return text


def _quoted(key: str) -> str:
    return f'"{key}"'
