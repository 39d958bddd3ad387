"""Text to token ids and back: what the runtime asks of a tokenizer, and one that needs no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_real.runtime.data.chat_templates import Message, render

__all__ = ["ByteTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that begins a sequence, with what this tokenizer puts before each (a begin-of-text)."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Tokens of the text alone, with nothing before or behind.

        For an answer, which follows a prompt, and for a conversation, whose template has written all special tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render_chat(self, messages: Sequence[Message], template: str | None) -> str | None:
        """A conversation as text, up to where the next answer begins.

        Args:
            messages: with the keys ``role`` and ``content``.
            template: Jinja text; None takes the tokenizer's own.

        Returns:
            None where there is neither.

        Raises:
            jinja2.TemplateError: the template is wrong, or refuses this conversation.
        """
        ...


class ByteTokenizer:
    """Token ids 0..255 are UTF-8 bytes, 256 is end-of-text."""

    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; end-of-text has none, and bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def render_chat(self, messages: Sequence[Message], template: str | None) -> str | None:
        return None if template is None else render(template, messages)
