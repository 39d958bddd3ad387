"""Prices from a profile: measured points come back, prices rise with the work, what was not measured is refused."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.dataflow import CallType
from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan_search.cluster import Device
from megatron_real.plan_search.costs.curves import Curve, Surface
from megatron_real.plan_search.costs.operations import (
    Collective,
    Grid,
    Group,
    MicroBatch,
    OperationCosts,
    Pass,
)
from megatron_real.plan_search.costs.profiled import ProfiledCost
from megatron_real.plan_search.profile_db import Entry, Operation, ProfileDatabase
from tests.unit.plan_search.profiles import (
    LENGTHS,
    SEQUENCES,
    contention,
    database,
    entry,
    layer_s,
    rest_s,
    spec,
)

MODEL = spec()
BASE = database()
COST: OperationCosts = ProfiledCost(BASE)


def batch(
    sequences: float, length: float, *, decode: bool = False, logits: float | None = None
) -> MicroBatch:
    """A micro-batch of equal sequences."""
    positions = sequences if logits is None else logits
    return MicroBatch(sequences, 1 if decode else length, length, positions)


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_measured_pass_comes_back_as_the_sum_of_its_parts(pass_: Pass, tp: int) -> None:
    grid = Grid(tp=tp)
    for sequences in SEQUENCES:
        for length in LENGTHS:
            one = batch(sequences, length, decode=pass_ is Pass.DECODE)
            layer = COST.layer(MODEL, 0, pass_, one, grid).total_s
            assert layer == pytest.approx(layer_s(sequences, length, tp))
            ends = (
                COST.embedding(MODEL, pass_, one, grid).total_s + COST.head(MODEL, pass_, one, grid).total_s
            )
            assert ends == pytest.approx(rest_s(sequences, length))


def test_logits_beyond_one_per_sequence_cost_more_where_a_pass_scores() -> None:
    for pass_ in Pass:
        scored = COST.head(MODEL, pass_, batch(4, 64, logits=200), Grid()).total_s
        extra = scored - COST.head(MODEL, pass_, batch(4, 64), Grid()).total_s
        expected = 196e-5 if pass_ in (Pass.FORWARD, Pass.TRAIN_FORWARD, Pass.BACKWARD) else 0.0
        assert extra == pytest.approx(expected)


def test_between_points_an_affine_time_is_exact_in_sequences_and_contexts() -> None:
    for sequences in (2, 7, 12.5):
        assert COST.layer(MODEL, 0, Pass.FORWARD, batch(sequences, 64), Grid()).total_s == pytest.approx(
            layer_s(sequences, 64, 1)
        )
        decode = batch(sequences, 150, decode=True)
        assert COST.layer(MODEL, 0, Pass.DECODE, decode, Grid()).total_s == pytest.approx(
            layer_s(sequences, 150, 1)
        )
    between = COST.layer(MODEL, 0, Pass.FORWARD, batch(4, 128), Grid()).total_s
    # The logarithm of the time is half-way between those at 64 and at 256.
    assert between == pytest.approx(math.sqrt(layer_s(4, 64, 1) * layer_s(4, 256, 1)))


def test_beyond_the_grid_time_grows_with_the_tokens_and_contexts_by_their_slope() -> None:
    largest = layer_s(16, 256, 1)
    assert COST.layer(MODEL, 0, Pass.FORWARD, batch(32, 256), Grid()).total_s == pytest.approx(2 * largest)
    assert COST.layer(MODEL, 0, Pass.FORWARD, batch(16, 512), Grid()).total_s == pytest.approx(2 * largest)
    decode = batch(16, 512, decode=True)
    assert COST.layer(MODEL, 0, Pass.DECODE, decode, Grid()).total_s == pytest.approx(layer_s(16, 512, 1))


def test_what_comes_once_per_pass_grows_by_its_slope() -> None:
    for sequences, length in ((4, 128), (16, 512)):
        one = batch(sequences, length)
        ends = [part(MODEL, Pass.FORWARD, one, Grid()).total_s for part in (COST.embedding, COST.head)]
        assert sum(ends) == pytest.approx(rest_s(sequences, length))


def test_ragged_sequences_are_priced_by_their_tokens_and_squares() -> None:
    # Of eight sequences four have 256 tokens and four none: four of 256.
    ragged = MicroBatch(8, 128, 128, 8, square_length=256**2 / 2)
    price = COST.layer(MODEL, 0, Pass.FORWARD, ragged, Grid())
    assert price.total_s == pytest.approx(layer_s(4, 256, 1))


def test_tensor_parallel_communication_is_inside_the_measured_time() -> None:
    one = batch(4, 64)
    assert COST.layer(MODEL, 0, Pass.FORWARD, one, Grid()).communication_s == 0.0
    both = COST.layer(MODEL, 0, Pass.FORWARD, one, Grid(tp=2))
    reduced = COST.collective(Collective.ALL_REDUCE, 4 * 64 * 64 * 4, Group(2))
    assert both.communication_s == pytest.approx(2 * reduced)
    assert both.compute_s == pytest.approx(layer_s(4, 64, 2) - 2 * reduced)


def test_launches_are_in_the_times_that_were_measured() -> None:
    assert COST.pass_floor(MODEL, 3, Pass.FORWARD) == COST.decode_step_floor(MODEL, 2) == 0.0
    assert COST.layer(MODEL, 0, Pass.DECODE, batch(0.5, 1, decode=True), Grid()).total_s > 0
    assert COST.call_overhead(CallType.TRAIN, Grid()) == 2e-3


def test_the_optimizer_follows_parameters_and_what_a_rank_owns_of_them() -> None:
    whole = COST.optimizer_step(MODEL, 180_000, 180_000, Grid())
    assert whole == pytest.approx(1.1e-3 + 2 * 180e-6)
    assert COST.optimizer_step(MODEL, 500_000, 180_000, Grid()) - whole == pytest.approx(320e-6)
    assert COST.optimizer_step(MODEL, 180_000, 90_000, Grid()) < whole


def test_collectives_by_bytes_and_group() -> None:
    kind = Collective.ALL_GATHER
    assert COST.collective(kind, 1e9, Group(1)) == 0.0
    assert COST.collective(kind, 1 << 19, Group(2)) == pytest.approx(2 * (1e-4 + 1e-9 * (1 << 19)))
    assert COST.collective(kind, 1 << 19, Group(3)) == pytest.approx(3 * (1e-4 + 1e-9 * (1 << 19)))
    assert COST.collective(kind, 1 << 24, Group(2)) == pytest.approx(2 * (1e-4 + 1e-9 * (1 << 24)))
    assert COST.point_to_point(1 << 21, within_node=True) == pytest.approx(1e-4 + 1e-9 * (1 << 21))
    assert COST.bandwidth(within_node=True) == pytest.approx((1 << 20) / (1e-4 + 2e-9 * (1 << 20)))
    assert COST.local_copy(1 << 19) == COST.host_copy(1 << 19) == pytest.approx(1e-6 + 1e-10 * (1 << 19))


def test_ranks_that_share_cores_slow_each_other() -> None:
    one = batch(4, 64)

    def price(busy: int, **changes: object) -> float:
        cost = ProfiledCost(database(**changes))
        return cost.layer(MODEL, 0, Pass.FORWARD, one, Grid(busy_ranks=busy)).total_s

    alone = layer_s(4, 64, 1)
    assert price(1) == price(2) == pytest.approx(alone)  # two ranks with a core each
    shared = {"ranks_per_node": 4, "num_ranks": 4}
    assert price(4, **shared) == pytest.approx(alone)  # what was measured
    assert price(2, **shared) == pytest.approx(alone / 2)
    with pytest.raises(PlanError, match="found no 4 ranks of a node at work at once; it has up to 2"):
        price(4)
    own_device = {"device_model": "Some GPU", **shared}
    assert price(1, **own_device) == pytest.approx(alone)  # what computes is no core


def shared_with(*entries: Entry) -> ProfiledCost:
    """Prices of four ranks on two cores, with contention of `entries` only."""
    base = database(ranks_per_node=4, num_ranks=4)
    others = [item for item in base.entries if item.operation != Operation.CONTENTION]
    return ProfiledCost(ProfileDatabase(provenance=base.provenance, entries=(*others, *entries)))


def test_by_how_much_ranks_slow_each_other_depends_on_what_they_do() -> None:
    one = batch(4, 64)
    measured = {
        (Pass.PREFILL, 1): {1: 0.3, 2: 0.4, 4: 1.0},
        (Pass.DECODE, 1): {1: 0.2, 2: 0.3, 4: 1.0},
        (Pass.BACKWARD, 1): {1: 0.5, 2: 0.5, 4: 1.0},
        (Pass.PREFILL, 2): {2: 0.8, 4: 1.0},
        (Operation.OPTIMIZER, 1): {1: 0.4, 2: 0.6, 4: 1.0},
    }
    cost = shared_with(
        *(
            contention(kind, tp, busy, length, 1e-5 * length * factor)
            for (kind, tp), factors in measured.items()
            for busy, factor in factors.items()
            for length in (16, 64)
        )
    )

    def factor(price: Callable[[Grid], float], busy: int, tp: int = 1) -> float:
        return price(Grid(tp=tp, busy_ranks=busy)) / price(Grid(tp=tp, busy_ranks=4))

    def layer(pass_: Pass) -> Callable[[Grid], float]:
        return lambda grid: cost.layer(MODEL, 0, pass_, one, grid).total_s

    assert factor(layer(Pass.FORWARD), 1) == pytest.approx(0.3)  # as prefills
    assert factor(layer(Pass.FORWARD), 3) == pytest.approx(0.7)
    assert factor(layer(Pass.PREFILL), 2, tp=2) == pytest.approx(0.8)
    assert factor(layer(Pass.DECODE), 2) == pytest.approx(0.3)
    assert factor(layer(Pass.BACKWARD), 1) == pytest.approx(0.5)
    assert factor(lambda grid: cost.optimizer_step(MODEL, 1e5, 1e5, grid), 2) == pytest.approx(0.6)
    assert factor(lambda grid: cost.call_overhead(CallType.TRAIN, grid), 1) == pytest.approx(0.3)
    assert factor(lambda grid: cost.head(MODEL, Pass.DECODE, one, grid).total_s, 2) == pytest.approx(0.3)
    with pytest.raises(PlanError, match="contention train_forward"):
        layer(Pass.TRAIN_FORWARD)(Grid(busy_ranks=2))
    with pytest.raises(PlanError, match="contention of decode with tp=2"):
        layer(Pass.DECODE)(Grid(tp=2, busy_ranks=2))
    interrupted = shared_with(contention(Pass.DECODE, 1, 2, 16, 1e-3))
    with pytest.raises(
        PlanError, match=r"on all 4 ranks of a node; it has fewer only\. Measure it with megatron-real"
    ):
        interrupted.layer(MODEL, 0, Pass.DECODE, batch(4, 64, decode=True), Grid(busy_ranks=2))


@given(
    factors=st.lists(st.floats(0.05, 1.5), min_size=4, max_size=4),
    small=st.floats(1e-6, 1e-2),
    ratio=st.sampled_from([1.0, 1.01, 1.5, 4.0, 100.0]),
    sequences=st.floats(0.2, 40),
    busy=st.integers(1, 3),
    more=st.floats(1, 3),
)
def test_prices_beside_others_rise_with_the_work_and_with_the_others(
    factors: list[float], small: float, ratio: float, sequences: float, busy: int, more: float
) -> None:
    cost = shared_with(
        *(
            contention(Pass.PREFILL, 1, number, length, seconds * factor)
            for length, seconds, some in ((16, small, factors[:2]), (64, small * ratio, factors[2:]))
            for number, factor in zip((1, 2, 4), (*some, 1.0), strict=True)
        )
    )

    def price(rows: float, number: int) -> float:
        return cost.layer(MODEL, 0, Pass.FORWARD, batch(rows, 64), Grid(busy_ranks=number)).total_s

    one = price(sequences, busy)
    assert 0 < one <= price(sequences * more, busy) * (1 + 1e-9)
    assert one <= price(sequences, busy + 1) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            Grid(tp=4),
            r"layer of hidden=64.* with tp=4, sp=0, tp_nodes=1; it has tp=1, sp=0, tp_nodes=1; tp=2",
        ),
        (Grid(tp=2, sp=True), "tp=2, sp=1"),
        (Grid(tp=2, tp_nodes=2), "tp_nodes=2"),
        (Grid(cp=2), "found cp=2; expected 1"),
        (Grid(ep=2), "found ep=2; expected 1"),
    ],
)
def test_layouts_that_were_not_measured_are_refused(grid: Grid, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        COST.layer(MODEL, 0, Pass.FORWARD, batch(4, 64), grid)


def test_shapes_that_were_not_measured_are_refused() -> None:
    one = batch(4, 64)
    with pytest.raises(
        PlanError, match=r"no layer forward of hidden=128 .*; it has hidden=64 .*megatron-real profile"
    ):
        COST.layer(spec(hidden_size=128), 0, Pass.FORWARD, one, Grid())
    with pytest.raises(PlanError, match=r"rest forward of hidden=64 scalar"):
        COST.head(spec(scalar_head=True), Pass.FORWARD, one, Grid())
    padded = COST.head(spec(padded_vocab_size=640), Pass.FORWARD, one, Grid())
    assert padded == COST.head(MODEL, Pass.FORWARD, one, Grid())
    with pytest.raises(PlanError, match="vocabulary of 50000; it has vocabularies of 512"):
        COST.head(spec(padded_vocab_size=50_000), Pass.FORWARD, one, Grid())
    with pytest.raises(PlanError, match="zero_gradients"):
        COST.optimizer_step(spec(ffn_hidden_size=256), 1.0, 1.0, Grid())
    for group in (Group(8), Group(2, 2)):
        with pytest.raises(PlanError, match=f"all_reduce over {group.size} ranks on {group.num_nodes} nodes"):
            COST.collective(Collective.ALL_REDUCE, 1.0, group)
    with pytest.raises(PlanError, match="point_to_point with within_node=0"):
        COST.point_to_point(1.0, within_node=False)
    with pytest.raises(PlanError, match="exchange with within_node=0"):
        COST.bandwidth(within_node=False)


def test_a_profile_of_another_device_is_refused() -> None:
    device = Device(name="h100", memory_bytes=1, constants={})
    with pytest.raises(ConfigError, match=r"measurements of cpu \(Some CPU\); expected h100"):
        ProfiledCost(database(), device)
    cost = ProfiledCost(database(), Device(name="cpu", memory_bytes=1, constants={}))
    assert cost.provenance["profile"] == database().hash
    assert cost.provenance["version.torch"] == "2.14"


@given(
    pass_=st.sampled_from(list(Pass)),
    sequences=st.floats(0.2, 40),
    length=st.floats(1, 800),
    factor=st.floats(1, 3),
    noise=st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9),
)
def test_prices_never_fall_when_the_work_rises(
    pass_: Pass, sequences: float, length: float, factor: float, noise: list[float]
) -> None:
    layers = [one for one in BASE.entries if one.operation is Operation.LAYER and one.kind == pass_]
    changed = [
        one.model_copy(update={"median_s": one.median_s * noise[index % 9]})
        for index, one in enumerate(layers)
    ]
    cost = ProfiledCost(BASE.merged(changed))
    decode = pass_ is Pass.DECODE

    def price(rows: float, width: float) -> float:
        return cost.layer(MODEL, 0, pass_, batch(rows, width, decode=decode), Grid()).total_s

    base = price(sequences, length)
    assert 0 < base <= price(sequences * factor, length) * (1 + 1e-9)
    assert base <= price(sequences, length * factor) * (1 + 1e-9)


@given(
    st.dictionaries(st.floats(1, 1e6), st.floats(1e-6, 1e3), min_size=1, max_size=8),
    st.floats(0.1, 1e7),
    st.floats(1, 10),
    st.booleans(),
    st.sampled_from(["proportional", "slope"]),
)
def test_curves_rise_and_stay_between_their_neighbours(
    points: dict[float, float], x: float, factor: float, log: bool, beyond: str
) -> None:
    curve = Curve.through(points, beyond=beyond, log=log)
    assert curve(x) <= curve(x * factor) * (1 + 1e-9)
    assert min(points.values()) * min(1.0, x / min(points)) <= curve(x) * (1 + 1e-9)
    if x <= max(points):
        assert curve(x) <= max(points.values()) * (1 + 1e-9)


def test_points_out_of_order_are_pooled() -> None:
    curve = Curve.through({1: 3.0, 2: 1.0, 3: 5.0})
    assert (curve(1), curve(2), curve(3)) == (2.0, 2.0, 5.0)


def test_a_ragged_grid_is_filled_in() -> None:
    surface = Surface.through({(1, 16): 1.0, (4, 16): 4.0, (1, 256): 16.0})
    assert surface(4, 256) == pytest.approx(64.0)


@pytest.mark.parametrize("per_sequence", [0.0, 1e-3])
def test_what_each_step_takes_does_not_grow_with_sequences(per_sequence: float) -> None:
    def step_s(sequences: float, context: float) -> float:
        return 0.02 + sequences * (per_sequence + 1e-5 * context)

    measured = [(1, 6), (4, 6), (32, 6), (1, 8), (4, 8), (32, 8), (1, 80), (4, 80)]
    surface = Surface.through({at: step_s(*at) for at in measured}, beyond="slope", log=False)
    for sequences in (6, 16, 32):
        true_s, found_s = step_s(sequences, 80), surface(sequences, 80)
        assert true_s * (1 - 1e-9) <= found_s <= surface(4, 80) * sequences / 4
        if per_sequence == 0.0:
            assert found_s == pytest.approx(true_s)
    noise = {at: 0.02 + 0.001 * ((at[0] * 7 + at[1]) % 3) for at in measured}
    assert Surface.through(noise, beyond="slope", log=False)(16, 80) < 0.05


def test_a_shape_that_is_measured_twice_uses_its_own_head() -> None:
    other = entry(Operation.CALL, 5e-3, kind="train")
    assert ProfiledCost(database().merged([other])).call_overhead(CallType.TRAIN, Grid()) == 5e-3
