"""Megatron's tokenizers as the runtime's `Tokenizer`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer

from megatron_real.errors import ConfigError
from megatron_real.runtime.data.chat_templates import Message, render
from megatron_real.runtime.data.tokenization import ByteTokenizer, Tokenizer

__all__ = ["build_tokenizer"]


class _MegatronTokenizer:
    """A tokenizer that Megatron built, of a library that adds nothing to a text: sentencepiece, tiktoken."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = int(tokenizer.vocab_size)
        self.end_token = int(tokenizer.eod)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenize(text))

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without the end-of-text token."""
        return str(self._tokenizer.detokenize([token for token in ids if token != self.end_token]))

    def render_chat(self, messages: Sequence[Message], template: str | None) -> str | None:
        template = template or self._tokenizer.chat_template
        return None if template is None else render(template, messages)


class _HuggingFaceTokenizer(_MegatronTokenizer):
    """A tokenizer of transformers inside Megatron's wrapper, which hides how to leave special tokens out."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._inner = tokenizer._tokenizer.tokenizer

    def encode_inside(self, text: str) -> list[int]:
        return list(self._inner(text, add_special_tokens=False).input_ids)

    def render_chat(self, messages: Sequence[Message], template: str | None) -> str | None:
        if template is None and not self._inner.chat_template:
            return None
        return str(
            self._inner.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )


def build_tokenizer(args: Namespace) -> Tokenizer:
    """The tokenizer that Megatron's arguments name; sets ``args.vocab_size`` where the tokenizer decides it.

    ``NullTokenizer`` has no text: here its ids are bytes, and 256 ends a text.

    Raises:
        ConfigError: the vocabulary is too small for bytes, or Megatron cannot build the tokenizer.
    """
    if args.tokenizer_type in (None, "NullTokenizer"):
        tokenizer = ByteTokenizer()
        args.vocab_size = args.vocab_size or tokenizer.vocab_size
        if args.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"--vocab-size: found {args.vocab_size} with NullTokenizer, whose ids are bytes here; expected "
                f"at least {tokenizer.vocab_size} (256 bytes and end-of-text)."
            )
        return tokenizer
    try:
        megatron_tokenizer = build_megatron_tokenizer(args)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type}: cannot be built ({error}).") from error
    of_transformers = megatron_tokenizer.library in ("huggingface", "megatron")
    built = (_HuggingFaceTokenizer if of_transformers else _MegatronTokenizer)(megatron_tokenizer)
    args.vocab_size = args.vocab_size or built.vocab_size
    return built
