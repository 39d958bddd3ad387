import json
from pathlib import Path

import pytest

from megatron_real.cli.main import main
from megatron_real.plan_search.comparison import PredictedRun
from megatron_real.trace import Span, SpanKind, Tracer


def run_folder(folder: Path, *, predicted: bool) -> Path:
    """Two ranks, four iterations: a generation of 2 s, then a training of 1 s that was predicted to take 2 s."""
    for rank in range(2):
        tracer = Tracer(folder / "trace", rank)
        for i in range(4):
            for name, start, end in (("run:actor_gen", 0.0, 2.0), ("run:actor_train", 2.0, 3.0)):
                kind = SpanKind.RUN
                span = tracer.span(
                    name, kind, i, type=name.rpartition("_")[2], model="actor", peak_bytes=3 << 20
                )
                tracer.write(span, 3.0 * i + start, 3.0 * i + end)
        tracer.close()
    spans = tuple(
        Span(
            rank=rank, iteration=i, name=name, kind=SpanKind.RUN, start_s=4.0 * i + start, end_s=4.0 * i + end
        )
        for rank in range(2)
        for i in range(4)
        for name, start, end in (("run:actor_gen", 0.0, 2.0), ("run:actor_train", 2.0, 4.0))
    )
    if predicted:
        run = PredictedRun(iteration_s=4.0, peak_memory_bytes={"0": 2 << 20, "1": 3 << 20}, spans=spans)
        run.dump(folder / "predicted.json")
    return folder


def test_tables_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", predicted=True)
    assert main(["compare", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert ["", "iteration", "4.000 s", "3.000 s", "0.75"] in rows
    assert ["call", "actor_gen", "2.000 s", "2.000 s", "1.00"] in rows
    assert ["call", "actor_train", "2.000 s", "1.000 s", "0.50"] in rows
    assert ["0", "2.0 MiB", "3.0 MiB", "1.50"] in rows
    assert "median of 3" in out
    picture = (folder / "compare.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.rstrip().endswith("</svg>")
    assert picture.count(">simulated<") == picture.count(">measured<") == 1
    # Three iterations of each, of which the simulated ones are drawn under the measured ones' numbers.
    for number in (1, 2, 3):
        assert picture.count(f">iteration {number}<") == 2
    assert picture.count("\nrank 1, iteration 2\n") == 4


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, predicted=True)
    assert main(["compare", str(folder), "--json", "--warmup", "2"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["iterations"] == 2
    iteration = tree["iteration"]
    assert (iteration["predicted_s"], iteration["measured_s"]) == (4.0, pytest.approx(3.0))
    assert iteration["ratio"] == pytest.approx(0.75)
    assert [(row["name"], row["ratio"]) for row in tree["rows"]] == [
        ("actor_gen", pytest.approx(1.0)),
        ("actor_train", pytest.approx(0.5)),
    ]
    assert tree["memory"][1] == {
        "rank": 1,
        "predicted_bytes": 3 << 20,
        "measured_bytes": 3 << 20,
        "ratio": 1.0,
    }
    assert tree["waits_s"] == {"0": 0, "1": 0}


def test_a_run_without_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, predicted=False)
    assert main(["compare", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "no simulated timeline: the plan has no prices" in out
    assert "simulated<" not in (folder / "compare.svg").read_text()


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "found no trace in" in capsys.readouterr().err
