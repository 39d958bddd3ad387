"""What `make learn` and `make rlhf` are made of: the task and its true rule, verdicts, stages that are not repeated."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from megatron_real.cli.train import allow_new_keys, options_from_config
from megatron_real.config import RunOptions, conf_dir
from megatron_real.plan import Plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    folders = [str(ROOT / name) for name in ("examples", "benchmarks")]
    sys.path[:0] = folders
    before = list(sys.path)
    yield
    sys.path[:] = [name for name in before if name not in folders]


@pytest.fixture(scope="module")
def capitals(on_path: None) -> ModuleType:
    import capitals

    return capitals


@pytest.fixture(scope="module")
def learn(on_path: None) -> ModuleType:
    import learn

    return learn


@pytest.fixture(scope="module")
def rlhf(on_path: None) -> ModuleType:
    import rlhf

    return rlhf


@pytest.mark.parametrize(
    ("response", "points"),
    [
        ("ABCDEF", 1.0),
        ("abcdef", 0.0),
        ("AbCdEf", 3 / 6),
        ("ABCDEX", 5 / 6),
        ("ABC", 3 / 6),
        ("ABCDEFF", 6 / 7),
        ("AABCDE", 1 / 6),  # all but the first stand in a wrong place
        ("ABCDEF" * 4, 6 / 24),
        ("", 0.0),
    ],
)
def test_true_rule(capitals: ModuleType, response: str, points: float) -> None:
    assert capitals.score(["abcdef>", "now write abcdef>"], [response] * 2) == pytest.approx([points] * 2)


def test_true_rule_wants_one_response_per_prompt(capitals: ModuleType) -> None:
    with pytest.raises(ValueError, match="shorter"):
        capitals.score(["abcdef>", "abcdef>"], ["ABCDEF"])


def test_words(capitals: ModuleType) -> None:
    some = {held_out: list(islice(capitals.words(1, held_out=held_out), 500)) for held_out in (True, False)}
    for words in some.values():
        assert len(set(words)) == 500
        assert all(len(word) == len(set(word)) == capitals.LETTERS and word.islower() for word in words)
    assert some[True] == list(islice(capitals.words(1, held_out=True), 500)), "the seed decides"
    others = set(islice(capitals.words(2, held_out=False), 5_000)) | set(some[False])
    assert others.isdisjoint(islice(capitals.words(3, held_out=True), 5_000))
    assert others.isdisjoint(some[True])


def test_writer(capitals: ModuleType) -> None:
    dice = random.Random(0)
    word = "abcdefghij"

    def written(**chances: float) -> list[str]:
        return [capitals.Writer(**chances).answer(word, dice) for _ in range(2_000)]

    assert set(written(capital=0.0)) == {word}
    assert set(written(capital=1.0)) == {word.upper()}
    # 20,000 letters: a share of 0.3 has a standard error of 0.0032.
    share = statistics.fmean(letter.isupper() for text in written(capital=0.3) for letter in text)
    assert share == pytest.approx(0.3, abs=0.016)
    wrong = [a != b for text in written(capital=0.0, wrong=0.2) for a, b in zip(text, word, strict=True)]
    assert statistics.fmean(wrong) == pytest.approx(0.2 * 25 / 26, abs=0.015)
    lengths = [len(text) for text in written(capital=0.0, dropped=0.1, doubled=0.05)]
    assert statistics.fmean(lengths) == pytest.approx(9.5, abs=0.15)
    assert {text.replace("bb", "b") for text in written(capital=0.0, doubled=1.0)} == {"aabccddeeffgghhiijj"}


def test_text_is_prompts_with_answers(capitals: ModuleType) -> None:
    words = list(islice(capitals.words(1, held_out=False), 400))
    tokens = list(capitals.text(words, capitals.CARELESS, seed=2))
    assert tokens[-1] == capitals.END_OF_TEXT
    ends = [-1, *(at for at, token in enumerate(tokens) if token == capitals.END_OF_TEXT)]
    texts = [bytes(tokens[a + 1 : b]).decode() for a, b in pairwise(ends)]
    prompts, answers = zip(*(text.split(">") for text in texts), strict=True)
    assert [prompt.split()[-1] for prompt in prompts] == words
    assert len({len(prompt) for prompt in prompts}) > 2, "prompts differ in length"
    points = statistics.fmean(capitals.score([prompt + ">" for prompt in prompts], list(answers)))
    assert 0.2 < points < 0.35, "some points, and far from all"


def test_answers_and_pairs(capitals: ModuleType) -> None:
    words = list(islice(capitals.words(1, held_out=True), 300))
    pairs = list(capitals.pairs(words, capitals.FAIR, seed=2))
    assert [pair["prompt"][-7:-1] for pair in pairs] == words
    prompts = [pair["prompt"] for pair in pairs]
    chosen = capitals.score(prompts, [pair["chosen"] for pair in pairs])
    rejected = capitals.score(prompts, [pair["rejected"] for pair in pairs])
    assert all(a > b for a, b in zip(chosen, rejected, strict=True))
    by_writer = {}
    for name in ("CARELESS", "FAIR", "CAREFUL"):
        records = list(capitals.answers(words, getattr(capitals, name), seed=3))
        by_writer[name] = statistics.fmean(
            capitals.score([record["prompt"] for record in records], [record["answer"] for record in records])
        )
    assert by_writer["CARELESS"] < by_writer["FAIR"] - 0.1 < by_writer["CAREFUL"] - 0.3


def test_every_algorithm_has_a_line_and_enough_data(learn: ModuleType) -> None:
    from megatron_real.algorithms.registry import ALGORITHMS

    names = {line.name for line in learn.LINES}
    assert names == set(ALGORITHMS) | {"dr_grpo", "dapo"}
    for line in learn.LINES:
        assert line.settings["iterations"] * line.settings["data.batch_size"] <= learn.TRAINED


def composed(command: list[str], folder: Path) -> RunOptions:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("train", allow_new_keys(command[command.index("train") + 1 :]))
    folder.mkdir()
    return options_from_config(config, folder)


def test_the_options_of_every_run_are_sound(learn: ModuleType, rlhf: ModuleType, tmp_path: Path) -> None:
    from small_model import train_command

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        folder.mkdir(exist_ok=True)
        for kind in ("prompts", "answers", "pairs"):
            for prefix in ("", "held-out-"):
                (folder / f"{prefix}{kind}.jsonl").touch()
    runs = {line.name: learn.run_settings(line, 1, tmp_path, checkpoint) for line in learn.LINES}
    for stage, kind, roles in (
        ("SFT", "answers", ("actor",)),
        ("REWARD", "pairs", ("reward",)),
        ("PPO", "prompts", ("actor", "critic", "reward")),
    ):
        runs[stage] = rlhf.run_settings(
            tmp_path, kind, getattr(rlhf, stage), **dict.fromkeys(roles, checkpoint)
        )
    for name, settings in runs.items():
        options = composed(train_command(tmp_path / name, settings), tmp_path / name)
        options.algorithm_config()
        assert Plan.load(options.plan).algorithm == options.algorithm.name
        assert (options.reward is not None) == ("reward" in settings)
        assert set(options.model) == {key.split(".")[1] for key in settings if key.endswith(".load")}


@pytest.mark.parametrize(
    ("ends", "lower_is_better", "ok"),
    [
        ((0.8, 0.9, 0.85), False, True),
        ((0.8, 0.9, 0.85), True, False),
        ((0.1, 0.15, 0.12), True, True),
        ((0.2, 0.9, 0.25), False, False),  # one seed of three
        ((0.3, 0.3, 0.3), False, False),  # nothing
    ],
)
def test_verdict(learn: ModuleType, ends: tuple[float, ...], lower_is_better: bool, ok: bool) -> None:
    line = learn.Line(
        name="x", data="prompts", metric="m", lower_is_better=lower_is_better, settings={"iterations": 1}
    )
    runs = [learn.Run(start=0.3, end=end, began_s=10.0 + i, ended_s=15.0 + i) for i, end in enumerate(ends)]
    found = learn.judge(line, runs)
    assert found["ok"] is ok
    gain = (-1 if lower_is_better else 1) * (statistics.fmean(ends) - 0.3)
    assert found["gain"] == pytest.approx(gain, abs=1e-4)
    assert found["end_error"] == pytest.approx(statistics.stdev(ends) / 3**0.5, abs=1e-4)
    assert (found["seconds"], found["seeds"]) == (7.0, 3)


def test_win_rate(rlhf: ModuleType) -> None:
    wins, losses, ties = 60, 10, 30
    answers = [("abcdef>", "abcdef", "ABCDEF")] * wins + [("abcdef>", "ABCDEF", "ABC")] * losses
    answers += [("abcdef>", "ABC", "ABCxyz")] * ties
    rate, error = rlhf.win_rate(answers)
    assert rate == pytest.approx(0.75)
    squares = wins * 0.25**2 + losses * 0.75**2 + ties * 0.25**2
    assert error == pytest.approx((squares / 99 / 100) ** 0.5)


def test_answers_of_both_actors(rlhf: ModuleType, tmp_path: Path) -> None:
    lines = [
        {
            "iteration": iteration,
            "of": "evaluation",
            "sequence": i,
            "prompt": prompt,
            "response": f"{iteration}{prompt}",
        }
        for iteration in (0, 20, 40)
        for i, prompt in enumerate(("b", "a"))
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rlhf.answers_of_both(tmp_path) == [("a", "0a", "40a"), ("b", "0b", "40b")]


def run_stages(
    rlhf: ModuleType, folder: Path, done: list[str], *, lr: float, fails: bool = False
) -> dict[str, float]:
    pipeline = rlhf.Pipeline(folder)

    def work(name: str) -> Any:
        def run(stage: Path) -> None:
            assert not list(stage.iterdir()), "what an unfinished stage left is gone"
            (stage / "left").touch()
            if name == "ppo" and fails:
                raise RuntimeError("killed")
            done.append(name)

        return run

    for name, settings in (("data", {}), ("sft", {"lr": lr}), ("ppo", {})):
        pipeline.stage(name, settings, work(name))
    return pipeline.seconds


def test_a_stage_that_is_done_is_not_repeated(rlhf: ModuleType, tmp_path: Path) -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError, match="killed"):
        run_stages(rlhf, tmp_path, done, lr=1.0, fails=True)
    assert done == ["data", "sft"]
    seconds = run_stages(rlhf, tmp_path, done, lr=1.0)
    assert done == ["data", "sft", "ppo"]
    assert run_stages(rlhf, tmp_path, done, lr=1.0) == seconds
    assert done == ["data", "sft", "ppo"]
    run_stages(rlhf, tmp_path, done, lr=2.0)
    assert done == ["data", "sft", "ppo", "sft", "ppo"], "what follows a changed stage is done again too"


def test_progress(on_path: None) -> None:
    from small_model import progress

    pretraining = (
        " [2026-11-30 03:21:50] iteration      100/    1000 | elapsed (ms): 207.2 | lm loss: 5.781540E+00 | x"
    )
    assert progress(pretraining) == "iteration 100/1000: loss 5.782"
    assert progress("iteration 1/40: 0.95 s, reward 0.4\n") == "iteration 1/40: 0.95 s, reward 0.4"
    assert progress("iteration 20/40: 0.95 s\n") == "iteration 20/40: 0.95 s"
    assert progress("iteration 21/40: 0.95 s\n") is None
    assert progress("Overwriting rerun_state_machine.current_iteration from -1 to 0...\n") is None
    assert progress("iteration 40: checkpoint written to runs\n") is None
