"""Lines of data sets: what is refused and how it is named, and the tokens that a line becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_real.dataflow import DataKind
from megatron_real.errors import ConfigError
from megatron_real.runtime.data.dataset import ByteTokenizer, Dataset, DatasetOptions

END = ByteTokenizer.end_token
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def load(path: Path, **options: object) -> Dataset:
    known = {"batch_size": 2, "max_prompt_tokens": 8, **options}
    return Dataset.load(path, ByteTokenizer(), DatasetOptions(**known))  # type: ignore[arg-type]


def problem(folder: Path, *lines: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, *lines), **options)
    return str(caught.value)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reads_prompts_with_columns(tmp_path: Path) -> None:
    prompts = load(write(tmp_path, '{"prompt": "ab", "answer": 1}', "", '{"answer": 2, "prompt": "é"}'))
    assert [record.text for record in prompts.records] == ["ab", "é"]
    assert prompts.records[1].tokens == (0xC3, 0xA9)
    assert [record.columns["answer"] for record in prompts.records] == [1, 2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": "ok"', r"line 2: found '{\"prompt\": \"ok\"' (Expecting ',' delimiter at column 16)"),
        ("[1]", "line 2: found a JSON list; expected a JSON object."),
        ('{"text": "x"}', 'line 2: found no key "prompt"; expected "prompt": a text or a list of messages.'),
        ('{"prompt": 3}', "line 2: found a prompt of type int"),
        ('{"prompt": ""}', "line 2: found an empty prompt; expected at least one token."),
        ('{"prompt": "123456789"}', "line 2: found a prompt of 9 tokens; expected at most 8"),
        (
            '{"prompt": "x", "answer": 1}',
            "line 2: found the columns ['answer']; expected [], the columns of line 1",
        ),
        (
            r'{"prompt": "a\ud800b"}',
            'line 2: found "prompt" with half a surrogate pair, ud800, at character 2; expected',
        ),
        ('{"prompt": "x", "responses": 1}', "line 2: found the column 'responses'; expected another name"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, found: str) -> None:
    path = write(tmp_path, '{"prompt": "ok"}', line)
    with pytest.raises(ConfigError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert found.replace("\\", "") in text.replace("\\", "")


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "x", '{"prompt": "ok"}', "y", *["z"] * 30))
    text = str(caught.value)
    assert "line 1:" in text
    assert "line 3:" in text
    assert "line 2:" not in text
    assert "12 more bad lines" in text


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_an_empty_file_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="found no prompts; expected one JSON object per line"):
        load(write(tmp_path, *lines))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="byte 12 is not UTF-8"):
        load(tmp_path / "latin")


def test_truncation_keeps_the_end(tmp_path: Path) -> None:
    (record,) = load(write(tmp_path, '{"prompt": "0123456789"}'), truncate=True).records
    assert record.text == "23456789"
    assert record.tokens == tuple(b"23456789")


def test_the_byte_tokenizer_round_trips() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve → ok\n"
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.end_token < tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.end_token]) == text
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "a\u2029b", "a\x85b"]
    path.write_bytes("\r\n".join(f'{{"prompt": "{text}"}}' for text in texts).encode())
    assert [record.text for record in load(path).records] == texts


def test_a_pair_of_surrogate_escapes_is_one_character(tmp_path: Path) -> None:
    (record,) = load(write(tmp_path, r'{"prompt": "\ud83d\ude00"}')).records
    assert record.text == "\U0001f600"


def test_the_digest_names_the_records_and_their_order(tmp_path: Path) -> None:
    lines = ('{"prompt": "a", "answer": 1}', '{"prompt": "b", "answer": 2}')
    digest = load(write(tmp_path, *lines)).digest()
    again = '{"answer": 1,   "prompt": "a"}'
    assert load(write(tmp_path, again, lines[1])).digest() == digest
    others = [lines[::-1], (lines[0], lines[0]), (lines[0], lines[1].replace("2", "3")), lines[:1]]
    assert len({digest, *(load(write(tmp_path, *other)).digest() for other in others)}) == 5


def test_the_digest_covers_answers(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "a", "answer": "{text}"}}' for text in ("b", "c")]
    first, second = (load(write(tmp_path, line), kind=DataKind.ANSWERS).digest() for line in lines)
    assert first != second


def test_an_answer_ends_with_the_end_token(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"prompt": "ab", "answer": "é", "level": 3}', '{"prompt": "c", "answer": "", "level": 4}'
    )
    first, second = load(path, kind=DataKind.ANSWERS).records
    assert (first.tokens, first.response) == (tuple(b"ab"), (0xC3, 0xA9, END))
    assert first.columns == {"level": 3}
    assert second.response == (END,)


def test_the_end_token_may_be_left_out(tmp_path: Path) -> None:
    line = '{"prompt": "a", "answer": "b"}'
    (record,) = load(write(tmp_path, line), kind=DataKind.ANSWERS, append_end=False).records
    assert record.response == tuple(b"b")
    text = problem(tmp_path, '{"prompt": "a", "answer": ""}', kind=DataKind.ANSWERS, append_end=False)
    assert 'line 1: found no token under "answer"; expected at least one.' in text


def test_pairs_become_two_records_the_chosen_one_first(tmp_path: Path) -> None:
    line = '{"prompt": "p", "rejected": "no", "chosen": "yes", "margin": 2.5}'
    chosen, rejected = load(write(tmp_path, line), kind=DataKind.PAIRS).records
    assert chosen.tokens == rejected.tokens == tuple(b"p")
    assert chosen.response == (*b"yes", END)
    assert rejected.response == (*b"no", END)
    assert chosen.columns == rejected.columns == {"margin": 2.5}


@pytest.mark.parametrize(
    ("kind", "line", "found"),
    [
        (
            DataKind.ANSWERS,
            '{"prompt": "a"}',
            'no key "answer"; expected "answer": a text or a list of messages.',
        ),
        (DataKind.ANSWERS, '{"prompt": "a", "answer": 7}', '"answer" of type int; expected a text or'),
        (
            DataKind.ANSWERS,
            '{"prompt": "a", "answer": "12345"}',
            '6 tokens under "answer"; expected at most 5',
        ),
        (DataKind.ANSWERS, r'{"prompt": "a", "answer": "\ud800"}', '"answer" with half a surrogate pair'),
        (DataKind.PAIRS, '{"prompt": "a", "chosen": "b"}', 'no key "rejected"'),
        (
            DataKind.PAIRS,
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}',
            "\"margin\" '1'; expected a finite number",
        ),
        (
            DataKind.PAIRS,
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
            '"margin" nan; expected a finite number',
        ),
    ],
)
def test_a_bad_answer_is_named(tmp_path: Path, kind: DataKind, line: str, found: str) -> None:
    assert f"line 1: found {found}" in problem(tmp_path, line, kind=kind, max_answer_tokens=5)


def test_a_long_answer_keeps_its_beginning_and_no_end(tmp_path: Path) -> None:
    lines = ['{"prompt": "0123456789", "answer": "abcde"}', '{"prompt": "x", "answer": "abcd"}']
    first, second = load(
        write(tmp_path, *lines), kind=DataKind.ANSWERS, max_answer_tokens=5, truncate=True
    ).records
    assert first.tokens == tuple(b"23456789")
    assert first.response == tuple(b"abcde")
    assert second.response == (*b"abcd", END)


def test_columns_are_found_under_the_names_of_the_data_set(tmp_path: Path) -> None:
    line = '{"question": "q", "prompt": "hidden", "solution": "s", "level": 1}'
    names = {"prompt": "question", "answer": "solution"}
    (record,) = load(write(tmp_path, line), kind=DataKind.ANSWERS, columns=names).records
    assert (record.text, record.response, record.columns) == ("q", (*b"s", END), {"level": 1})
    (record,) = load(write(tmp_path, line), columns=names).records
    assert record.columns == {"answer": "s", "level": 1}, "a reward function gets it under our name"
    text = problem(tmp_path, '{"query": "q"}', columns={"prompt": "question"})
    assert (
        "line 1: found no key \"question\"; expected those that data.columns names; here are ['query']."
        in text
    )


def test_messages_go_through_the_template(tmp_path: Path) -> None:
    line = '{"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "n": 1}'
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    for option in (TEMPLATE, str(template)):
        (record,) = load(write(tmp_path, line), chat_template=option, max_prompt_tokens=99).records
        assert record.text == "<system>S<user>U<assistant>"
        assert record.tokens == tuple(record.text.encode())
        assert record.columns == {"n": 1}


def test_the_last_message_is_the_answer(tmp_path: Path) -> None:
    talk = '[{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]'
    options = {"kind": DataKind.ANSWERS, "chat_template": TEMPLATE, "max_prompt_tokens": 99}
    (record,) = load(write(tmp_path, f'{{"messages": {talk}}}'), **options).records
    assert record.text == "<user>U<assistant>"
    assert record.response == (*b"A", END)
    found = '2 messages under "chosen", the first of the user; expected one message of the assistant'
    line = f'{{"prompt": "p", "chosen": {talk}, "rejected": "x"}}'
    assert found in problem(tmp_path, line, **{**options, "kind": DataKind.PAIRS})


def test_an_answer_may_be_one_message(tmp_path: Path) -> None:
    line = '{"prompt": "p", "chosen": [{"role": "assistant", "content": "A"}], "rejected": "x"}'
    chosen, _ = load(write(tmp_path, line), kind=DataKind.PAIRS).records
    assert chosen.response == (*b"A", END)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("[]", '"prompt" without messages; expected a list of them'),
        (
            '[{"role": "user", "content": "U"}, {"role": "user"}]',
            'message 2 under "prompt" without a role and content',
        ),
        (
            '[{"role": "tool", "content": "x"}]',
            "messages that the chat template refuses (no tools); expected a conv",
        ),
        (
            '[{"role": "name", "content": "x"}]',
            "messages that the chat template refuses ('dict object' has no attribute",
        ),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, prompt: str, found: str) -> None:
    template = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% if tools %}never{% endif %}{{ messages[0].name if messages[0].role == 'name' else 'ok' }}"
    )
    lines = ('{"prompt": [{"role": "user", "content": "U"}]}', f'{{"prompt": {prompt}}}')
    assert f"line 2: found {found}" in problem(tmp_path, *lines, chat_template=template)


def test_messages_without_a_template_are_one_error(tmp_path: Path) -> None:
    line = '{"prompt": [{"role": "user", "content": "U"}]}'
    text = problem(tmp_path, '{"prompt": "a"}', line, line)
    assert "line 2: found a prompt of chat messages; the tokenizer has no chat template." in text
    assert "line 3" not in text


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("none.jinja", "found 'none.jinja', which is no Jinja text and no file"),
        ("{% if %}", "line 1 is no Jinja"),
    ],
)
def test_a_bad_template_is_refused(tmp_path: Path, option: str, found: str) -> None:
    assert found in problem(tmp_path, '{"prompt": "a"}', chat_template=option)
