"""The picture is well-formed, and its bars lie where the spans are."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_real.timeline import pick_iterations, timeline_svg, write_timeline
from megatron_real.trace import Span, SpanKind, attribute_waits

SVG = "{http://www.w3.org/2000/svg}"


def span(
    rank: int, name: str, kind: str, start_s: float, end_s: float, iteration: int = 0, **facts: object
) -> Span:
    return Span(
        rank=rank,
        iteration=iteration,
        name=name,
        kind=SpanKind(kind),
        start_s=start_s,
        end_s=end_s,
        facts=facts,
    )


SPANS = (
    span(0, "run:actor_gen", "run", 100, 104, model="actor", type="generate"),
    span(3, "run:actor_gen", "run", 100, 102, model="actor", type="generate"),
    span(3, "transfer:actor_gen>critic_train", "wait", 102, 105, side="receive"),
    span(0, "run:actor_train", "run", 104, 110, model="actor", type="train"),
    span(3, "run:critic_train", "run", 105, 109, model="critic", type="train"),
    span(0, "run:actor_gen", "run", 110, 112, 1, model="actor", type="generate"),
)


def bars(svg: str) -> dict[str, list[tuple[float, float, float, str]]]:
    """By the first line of its tooltip: left, top, width and fill of every bar."""
    result: dict[str, list[tuple[float, float, float, str]]] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        tip = (group.findtext(f"{SVG}title") or "").split("\n")[0]
        rect = group.find(f"{SVG}rect")
        if rect is None:
            continue  # a heading
        left, top, width = (float(rect.get(key, "nan")) for key in ("x", "y", "width"))
        result.setdefault(tip, []).append((left, top, width, rect.get("fill", "")))
    return result


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_are_to_scale() -> None:
    drawn = bars(timeline_svg({"": SPANS}))
    (gen_0, gen_3, gen_next), (train,) = drawn["run:actor_gen"][:3], drawn["run:actor_train"]
    (wait,) = drawn["waiting in transfer:actor_gen>critic_train"]
    if gen_3[1] < gen_next[1]:
        gen_3, gen_next = gen_next, gen_3  # drawn lane by lane
    scale = gen_0[2] / 4
    for bar, start_s, length_s in ((gen_3, 0, 2), (wait, 2, 3), (train, 4, 6), (gen_next, 10, 2)):
        assert bar[0] == pytest.approx(gen_0[0] + start_s * scale, abs=0.02)
        assert bar[2] == pytest.approx(length_s * scale, abs=0.02)
    assert gen_0[1] == train[1] < gen_3[1] == wait[1]
    assert wait[3] == "url(#real-wait)"
    assert len({gen_0[3], train[3], drawn["run:critic_train"][0][3]}) == 3
    assert gen_0[3] == gen_3[3]


def test_labels_legend_and_axis() -> None:
    found = texts(timeline_svg({"": SPANS}, title="a < b & c"))
    assert "a < b & c" in found
    assert [text for text in found if text.startswith("rank")] == ["rank 0", "rank 3"]
    assert [text for text in found if text.startswith("iteration")] == ["iteration 0", "iteration 1"]
    assert "wait" in found
    assert "realloc" not in found
    ticks = [text for text in found if text.endswith(" s")]
    assert ticks == [f"{second} s" for second in (0, 2, 4, 6, 8, 10, 12)]


def test_panels_share_a_scale_and_start_at_their_own_zero() -> None:
    shifted = [span(0, "run:actor_gen", "run", 0, 2)]
    svg = timeline_svg({"measured": SPANS, "simulated": shifted}, iterations=[0])
    drawn = bars(svg)["run:actor_gen"]
    assert [bar[0] for bar in drawn] == [drawn[0][0]] * 3
    assert drawn[2][2] == pytest.approx(drawn[0][2] / 2, abs=0.02)
    assert {"measured", "simulated"} <= set(texts(svg))
    assert "iteration 1" not in texts(svg)


def test_calls_without_facts_and_models_beyond_the_known_ones() -> None:
    names = ("actor_gen", "actor_inf", "actor_train", "judge_inf", "tool_inf", "rew_inf")
    spans = [span(0, f"run:{name}", "run", i, i + 1) for i, name in enumerate(names)]
    fills = [bars(timeline_svg({"": spans}))[f"run:{name}"][0][3] for name in names]
    assert len(set(fills)) == len(names)
    assert all(fill.startswith("#") for fill in fills)


@pytest.mark.parametrize("length_s", [1e-4, 0.03, 0.7, 12.0, 4000.0])
def test_ticks_are_readable(length_s: float) -> None:
    svg = timeline_svg({"": [span(0, "run:actor_gen", "run", 5, 5 + length_s)]})
    ticks = [float(text[:-2]) for text in texts(svg) if text.endswith(" s")]
    assert 5 <= len(ticks) <= 13
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert 0.85 * length_s <= ticks[-1] + steps[0]


def test_nothing_to_draw() -> None:
    assert ElementTree.fromstring(timeline_svg({"": []})).tag == f"{SVG}svg"
    assert ElementTree.fromstring(timeline_svg({})).tag == f"{SVG}svg"


def test_a_few_iterations_are_picked(tmp_path: Path) -> None:
    def run(count: int) -> list[Span]:
        return [span(0, "run:actor_gen", "run", i, i + 1, iteration=i) for i in range(count)]

    assert pick_iterations(run(20)) == (9, 10, 11)
    assert pick_iterations(run(4)) == (1, 2, 3)
    assert pick_iterations(run(2)) == (0, 1)
    path = tmp_path / "pictures" / "timeline.svg"
    write_timeline(run(20), path, title="Run")
    assert [text for text in texts(path.read_text()) if text.startswith("iteration")] == [
        f"iteration {i}" for i in (9, 10, 11)
    ]


def test_the_gathering_of_the_lengths_is_a_transfer() -> None:
    name, facts = "transfer:actor_gen>lengths", {"side": "gather", "joint": "0-1"}
    spans = [
        span(0, name, "transfer", 2, 7, **facts),
        span(1, "run:actor_gen", "run", 0, 6, model="actor", type="generate"),
        span(1, name, "transfer", 6, 7, **facts),
    ]
    drawn = bars(timeline_svg({"": attribute_waits(spans)}))
    assert [bar[3] for bar in drawn[f"waiting in {name}"]] == ["url(#real-wait)"]
    assert len({bar[3] for bar in drawn[name]}) == 1
    assert len(drawn[name]) == 2
