"""Megatron's tokenizers behind the runtime's: what they add to a text, and how conversations become texts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from megatron_real.errors import ConfigError
from megatron_real.hooks import tokenizer as hooked
from megatron_real.hooks.tokenizer import build_tokenizer
from megatron_real.runtime.data.dataset import ByteTokenizer

pytestmark = pytest.mark.megatron

MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
BEGIN, END = 1, 2


def _args(**changes: object) -> Namespace:
    return Namespace(**{"tokenizer_type": None, "vocab_size": None} | changes)


class _Transformers:
    """A tokenizer of transformers that puts a begin-of-text before each text and has a chat template."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[BEGIN] * add_special_tokens + [3 + byte for byte in text.encode()])

    def apply_chat_template(self, messages, *, chat_template, tokenize, add_generation_prompt) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"{chat_template or self.chat_template}/{messages[0]['content']}"


def _wrapped(inner: _Transformers) -> SimpleNamespace:
    """As Megatron wraps it."""
    return SimpleNamespace(
        library="huggingface",
        vocab_size=300,
        eod=END,
        tokenize=lambda text: inner(text).input_ids,
        detokenize=lambda ids: bytes(token - 3 for token in ids if token > END).decode(),
        _tokenizer=SimpleNamespace(tokenizer=inner),
    )


def test_a_tokenizer_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _Transformers("own")
    monkeypatch.setattr(hooked, "build_megatron_tokenizer", lambda args: _wrapped(inner))
    args = _args(tokenizer_type="HuggingFaceTokenizer")
    tokenizer = build_tokenizer(args)
    assert args.vocab_size == 300
    assert tokenizer.encode("a") == [BEGIN, 3 + ord("a")]
    assert tokenizer.encode_inside("a") == [3 + ord("a")], "an answer begins no text"
    assert tokenizer.decode([3 + ord("a"), END]) == "a"
    assert tokenizer.render_chat(MESSAGES, None) == "own/hello"
    assert tokenizer.render_chat(MESSAGES, "given") == "given/hello"
    inner.chat_template = None
    assert tokenizer.render_chat(MESSAGES, None) is None


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text").write_text("hello world\nuser says hello\nassistant: hello user\n")
    SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tiny"),
        vocab_size=21,
        minloglevel=2,
        byte_fallback=False,
    )
    return folder / "tiny.model"


@pytest.mark.parametrize("own", [None, "{{ messages[0].content }} own"])
def test_a_sentencepiece_tokenizer(sentencepiece_model: Path, own: str | None) -> None:
    args = _args(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(sentencepiece_model),
        chat_template=own,
        tokenizer_sentencepiece_ignore_extra_whitespaces=False,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=False,
    )
    tokenizer = build_tokenizer(args)
    ids = tokenizer.encode("hello world")
    assert tokenizer.encode_inside("hello world") == ids
    assert tokenizer.decode([*ids, tokenizer.end_token]) == "hello world"
    assert max(ids) < tokenizer.vocab_size == args.vocab_size == 21
    assert tokenizer.render_chat(MESSAGES, TEMPLATE) == "user: hello\nassistant:"
    assert tokenizer.render_chat(MESSAGES, None) == (own and "hello own")


def test_without_a_tokenizer_ids_are_bytes() -> None:
    args = _args()
    assert isinstance(build_tokenizer(args), ByteTokenizer)
    assert args.vocab_size == 257
    with pytest.raises(ConfigError, match=r"--vocab-size: found 256 with NullTokenizer"):
        build_tokenizer(_args(vocab_size=256))


def test_a_tokenizer_that_cannot_be_built_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-type Nonsense: cannot be built"):
        build_tokenizer(_args(tokenizer_type="Nonsense"))
