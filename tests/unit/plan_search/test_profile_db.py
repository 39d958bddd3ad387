"""The profile file: written and read alike, one device per file, one clear error for what is wrong; and its options."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.errors import ConfigError
from megatron_real.plan_search.profile_db import Entry, Operation, ProfileDatabase, head_key, layer_key
from megatron_real.plan_search.profile_options import ProfileOptions
from tests.unit.plan_search.profiles import database, entry, provenance, spec


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = database()
    path = tmp_path / "profile.json"
    written.dump(path)
    assert ProfileDatabase.load(path) == written
    assert sorted(file.name for file in tmp_path.iterdir()) == ["profile.json"]
    assert ProfileDatabase.loads(ProfileDatabase(provenance=provenance()).dumps()).entries == ()


def test_the_hash_is_of_the_content_and_not_of_its_order() -> None:
    one = database()
    shuffled = list(one.entries)
    random.Random(0).shuffle(shuffled)
    assert one.model_copy(update={"entries": tuple(shuffled)}).hash == one.hash
    slower = one.entries[0].model_copy(update={"median_s": 1.0})
    assert one.merged([slower]).hash != one.hash
    assert database(threads=2).hash != one.hash


def test_a_new_measurement_takes_the_place_of_the_old_one() -> None:
    one = database()
    again = one.entries[3].model_copy(update={"median_s": 9.0})
    fresh = entry(Operation.CALL, 1.0, kind="other")
    merged = one.merged([again, fresh])
    assert len(merged.entries) == len(one.entries) + 1
    assert [found.median_s for found in merged.entries if found.key == again.key] == [9.0]
    assert fresh.key in merged.known()
    assert fresh.key not in one.known()


def test_what_keeps_measurements_apart() -> None:
    here = provenance()
    assert here.differences(provenance(date="2026-02-02T00:00:00+00:00", host="there")) == []
    assert here.differences(provenance(device_model="Other CPU", versions={"torch": "2.15"})) == [
        "device_model=Other CPU (not Some CPU)",
        "versions.torch=2.15 (not 2.14)",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=7), "found version 7; expected 1"),
        (lambda raw: raw.update(other=1), "other: Extra inputs"),
        (lambda raw: raw["entries"][0].update(median_s=-1.0), r"entries.0.median_s"),
        (lambda raw: raw["entries"][0].update(operation="guess"), r"entries.0.operation"),
        (lambda raw: raw["provenance"].pop("device"), "provenance.device: Field required"),
        (lambda raw: raw["entries"].append(raw["entries"][0]), "two entries of layer forward hidden=64"),
    ],
)
def test_what_is_not_sound_is_refused_in_one_error(change: object, message: str, tmp_path: Path) -> None:
    raw = json.loads(database().dumps())
    change(raw)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message) as caught:
        ProfileDatabase.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        ProfileDatabase.load(tmp_path / "none.json")
    for text in ("{", "[]", "null"):
        with pytest.raises(ConfigError, match=r"found (no JSON|version None)"):
            ProfileDatabase.loads(text)
    with pytest.raises(ConfigError, match="cannot be written"):
        database().dump(tmp_path / "no-folder" / "profile.json")


def test_keys_tell_shapes_apart_and_roles_not() -> None:
    actor, critic = spec(), spec(scalar_head=True)
    assert layer_key(actor, 0) == layer_key(critic, 0) == layer_key(spec(num_layers=9), 3)
    assert head_key(actor) != head_key(critic)
    changes = (
        {"hidden_size": 128},
        {"num_query_groups": 4},
        {"ffn_hidden_size": 256},
        {"gated_mlp": False},
        {"qk_norm": True},
        {"linear_bias": True},
        {"num_experts": 4, "experts_per_token": 2},
    )
    keys = {layer_key(spec(**change), 0) for change in changes} | {layer_key(actor, 0)}
    assert len(keys) == len(changes) + 1
    mixed = spec(num_experts=4, num_dense_layers=1)
    assert layer_key(mixed, 0) == layer_key(actor, 0) != layer_key(mixed, 1)


def test_an_entry_says_how_often_it_was_measured() -> None:
    with pytest.raises(ValueError, match="repetitions"):
        Entry(operation=Operation.CALL, median_s=1.0, spread_s=0.0, repetitions=0)


@given(
    sequences=st.integers(1, 300),
    length=st.integers(2, 5000),
    step=st.floats(1.5, 8.0),
    max_tokens=st.integers(1, 100_000),
    max_bytes=st.integers(1, 100_000),
)
def test_the_grid_covers_what_was_asked_for(
    sequences: int, length: int, step: float, max_tokens: int, max_bytes: int
) -> None:
    options = ProfileOptions(
        devices_per_node=2,
        max_sequences=sequences,
        max_length=length,
        step=step,
        max_tokens=max_tokens,
        max_bytes=max_bytes,
    )
    rows, lengths = options.sequence_grid(), options.length_grid()
    assert (rows[0], rows[-1], lengths[-1]) == (1, sequences, length)
    for grid in (rows, lengths):
        assert list(grid) == sorted(set(grid))
        assert all(high <= low * step + 1 for low, high in pairwise(grid))
    shapes = options.shapes()
    assert {one for _, one in shapes} == set(lengths)
    for length in lengths:
        counts = [count for count, one in shapes if one == length]
        assert max(counts) == max(1, min(sequences, max_tokens // length))
        assert set(counts) - {max(counts)} == {count for count in rows if count < max(counts)}
    assert options.byte_grid()[-1] == options.max_bytes
    assert ProfileOptions.loads(options.dumps()) == options


def test_wrong_options_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileOptions.from_tree({"max_sequences": 0, "spam": 1, "layers": [2, 2]})
    text = str(caught.value)
    assert all(
        name in text for name in ("devices_per_node", "max_sequences", "spam: found an unknown option")
    )
    with pytest.raises(ConfigError, match="layers: the second number"):
        ProfileOptions.from_tree({"devices_per_node": 2, "layers": [2, 2]})
