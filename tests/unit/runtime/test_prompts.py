"""Prompts: what is refused and how it is named, and the order in which they are dealt out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_real.errors import ConfigError
from megatron_real.runtime.prompts import ByteTokenizer, PromptOptions, Prompts, Record


def load(path: Path, **options: object) -> Prompts:
    known = {"batch_size": 2, "max_prompt_tokens": 8, **options}
    return Prompts.load(path, ByteTokenizer(), PromptOptions(**known))  # type: ignore[arg-type]


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
        ("[1]", 'line 2: found a JSON list; expected an object with the key "prompt".'),
        ('{"text": "x"}', 'line 2: found no key "prompt"; expected "prompt": a text.'),
        ('{"prompt": 3}', "line 2: found a prompt of type int"),
        ('{"prompt": ""}', "line 2: found an empty prompt; expected at least one token."),
        ('{"prompt": "123456789"}', "line 2: found a prompt of 9 tokens; expected at most 8"),
        (
            '{"prompt": "x", "answer": 1}',
            "line 2: found the columns ['answer']; expected [], the columns of line 1",
        ),
        (
            r'{"prompt": "a\ud800b"}',
            "line 2: found a prompt with half a surrogate pair, ud800, at character 2; expected",
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


def records(count: int) -> list[Record]:
    return [Record(text=str(n), tokens=(n, n), columns={"n": n}) for n in range(count)]


def drawn(prompts: Prompts, iterations: range) -> list[str]:
    return [record.text for i in iterations for record in prompts.batch(i).records]


def test_every_epoch_has_each_prompt_once_in_its_own_order() -> None:
    prompts = Prompts(records(10), batch_size=4, seed=3)
    order = drawn(prompts, range(10))  # four epochs; batches cross their borders
    epochs = [order[begin : begin + 10] for begin in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_seed_and_iteration_alone() -> None:
    whole = drawn(Prompts(records(10), batch_size=4, seed=3), range(10))
    resumed = Prompts(records(10), batch_size=4, seed=3)
    assert drawn(resumed, range(6, 10)) == whole[24:]
    assert drawn(resumed, range(1, 2)) == whole[4:8], "also backwards"
    assert drawn(Prompts(records(10), batch_size=4, seed=4), range(10)) != whole


def test_samples_of_a_prompt_have_consecutive_ids() -> None:
    batch = Prompts(records(4), batch_size=2, samples_per_prompt=3, seed=0).batch(0)
    texts = [record.text for record in batch.records]
    assert len(texts) == 6
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]


def test_a_batch_of_some_sequences() -> None:
    batch = Prompts(records(3), batch_size=3, seed=0).batch(0)
    chosen = batch.batch((2, 0))
    assert chosen.ids == (2, 0)
    assert chosen.prompt_lengths == (2, 2)
    assert chosen.response_lengths == (0, 0)
    right = [*batch.records[2].tokens, *batch.records[0].tokens]
    assert torch.equal(chosen.data["tokens"], torch.tensor(right))
    assert batch.columns((2, 0)) == {"n": (batch.records[2].columns["n"], batch.records[0].columns["n"])}


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0)])
def test_nothing_to_deal_out_is_refused(count: int, size: int) -> None:
    with pytest.raises(ConfigError, match="expected at least one of each"):
        Prompts(records(count), batch_size=size)


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
