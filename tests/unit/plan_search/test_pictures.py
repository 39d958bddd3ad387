"""Pictures say what the estimate says, and are sound XML."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_real.errors import ConfigError
from megatron_real.plan_search.pictures import (
    TradeOff,
    memory_svg,
    timeline_picture,
    tradeoff_svg,
    write_picture,
    write_pictures,
)
from megatron_real.plan_search.planner import Estimate
from megatron_real.plan_search.report import bytes_text
from tests.unit.plan_search.small_plan import planner, split_plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    found = planner()
    return found.estimate(split_plan(found))


def _bars(text: str) -> list[dict[str, tuple[float, str]]]:
    """Of each bar, by the legend of its parts: height in pixels, and the tip."""
    bars: dict[float, dict[str, tuple[float, str]]] = {}
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is None or rect is None or title.text is None:
            continue
        name, part = title.text.splitlines()[:2]
        bottom = float(rect.get("y", 0)) + float(rect.get("height", 0))
        key = float(rect.get("x", 0)) * 1e4 + _panel(bottom)
        bars.setdefault(key, {})[part.partition(":")[0]] = (float(rect.get("height", 0)), name)
    return list(bars.values())


def _panel(y: float) -> float:
    """Panels are 254 pixels apart, and the first begins at 70."""
    return (y - 70) // 254


def test_bars_are_as_high_as_their_bytes(estimate: Estimate) -> None:
    capacity = planner().cluster.capacity_bytes
    bars = _bars(memory_svg(estimate, capacity))
    top = 1.12 * max(capacity, estimate.memory.peak_bytes)
    heights = [sum(height for height, _ in bar.values()) for bar in bars]
    assert max(heights) == pytest.approx(150 * estimate.memory.peak_bytes / top, abs=0.1)
    fullest = bars[heights.index(max(heights))]
    group = max(estimate.memory.groups, key=lambda group: group.peak_bytes)
    assert {name for _, name in fullest.values()} == {group.peak_at}
    weights = sum(size for owner, size in group.holders if owner.endswith(" parameters"))
    assert fullest["weights"][0] == pytest.approx(150 * weights / top, abs=0.1)


def test_every_group_of_ranks_has_a_panel_and_the_capacity_a_line(estimate: Estimate) -> None:
    text = memory_svg(estimate, planner().cluster.capacity_bytes)
    assert re.findall(r"ranks? ([\d-]+)[:,]", text) == ["0-1", "2-3"]
    assert text.count('stroke-dasharray="6 4"') == 2
    assert text.count(f"capacity {bytes_text(planner().cluster.capacity_bytes)}") == 2


def test_the_timeline_has_the_simulated_calls(estimate: Estimate) -> None:
    text = timeline_picture(estimate)
    ElementTree.fromstring(text)
    for call in estimate.plan.calls:
        assert f"run:{call}" in text
    assert text.count(">rank ") == 4


def test_a_large_cluster_has_a_lane_for_each_group() -> None:
    found = planner(32)
    text = timeline_picture(found.estimate(split_plan(found)))
    assert [f">rank {rank}<" in text for rank in (0, 1, 16, 17)] == [True, False, True, False]


def test_points_of_a_sweep_go_down_and_right() -> None:
    text = tradeoff_svg([TradeOff("a < b", 8, 20.0), TradeOff("a < b", 16, 11.0), TradeOff("", 8, 30.0)])
    circles = [
        (float(c.get("cx", 0)), float(c.get("cy", 0)))
        for c in ElementTree.fromstring(text).iter(f"{SVG}circle")
    ]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert x1 == x3 < x2
    assert y3 < y1 < y2  # shorter periods lie lower
    ElementTree.fromstring(tradeoff_svg([]))
    ElementTree.fromstring(tradeoff_svg([TradeOff("", 8, 20.0)]))


def test_pictures_are_written_or_an_error_says_why_not(estimate: Estimate, tmp_path: Path) -> None:
    paths = write_pictures(estimate, planner().cluster.capacity_bytes, tmp_path / "new", stem="x-")
    assert [path.name for path in paths] == ["x-timeline.svg", "x-memory.svg"]
    assert all(path.read_text().startswith("<svg") for path in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"pictures: .*cannot be written"):
        write_picture(tmp_path / "file" / "x.svg", "")
