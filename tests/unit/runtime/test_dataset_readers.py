"""Where lines come from: files, folders of them, and the library `datasets`, by a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_real.errors import ConfigError
from megatron_real.runtime.data.dataset import ByteTokenizer, Dataset, DatasetOptions
from megatron_real.runtime.data.readers import read_lines

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the readers use of the library; `asked` holds how it was called."""
    module = ModuleType("datasets")

    class DatasetDict(dict):
        pass

    class DatasetsError(Exception):
        pass

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict]:
        module.asked.append((name, config, split))
        if name == "org/none":
            raise FileNotFoundError("not on the hub")
        if name == "org/broken":
            raise DatasetsError("no JSON")
        return ROWS

    def load_from_disk(folder: str) -> object:
        module.asked.append(Path(folder).name)
        saved = {"rows": ROWS, "splits": DatasetDict(train=ROWS, test=[]), "tests": DatasetDict(test=ROWS)}
        return saved[Path(folder).name]

    module.asked = []
    module.exceptions = SimpleNamespace(DatasetsError=DatasetsError)
    module.DatasetDict, module.load_dataset, module.load_from_disk = DatasetDict, load_dataset, load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:org/name", ("org/name", None, "train")),
        ("hf:org/name:test", ("org/name", None, "test")),
        ("hf:openai/gsm8k@main:train[:10%]", ("openai/gsm8k", "main", "train[:10%]")),
    ],
)
def test_names_of_the_hub(datasets: ModuleType, source: str, asked: tuple[object, ...]) -> None:
    assert [(line.where, line.values) for line in read_lines(source)] == [
        ("row 1", ROWS[0]),
        ("row 2", ROWS[1]),
    ]
    assert datasets.asked == [asked]


def test_a_saved_folder_or_its_train_split(datasets: ModuleType, tmp_path: Path) -> None:
    for name in ("rows", "splits", "tests"):
        (tmp_path / name).mkdir()
    for name in ("rows", "splits"):
        assert [line.values for line in read_lines(tmp_path / name)] == ROWS
    with pytest.raises(
        ConfigError, match=r"tests: found the splits \['test'\]; expected one that is named train"
    ):
        list(read_lines(tmp_path / "tests"))


def test_bad_rows_are_named(datasets: ModuleType) -> None:
    options = DatasetOptions(batch_size=1, max_prompt_tokens=9, columns={"prompt": "question"})
    with pytest.raises(ConfigError, match=r'^hf:org/name: 2 problems\n  - row 1: found no key "question"'):
        Dataset.load("hf:org/name", ByteTokenizer(), options)


def test_what_the_library_refuses_and_its_absence(
    datasets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"hf:org/none: cannot be loaded \(FileNotFoundError: not on the hub\)"
    ):
        list(read_lines("hf:org/none"))
    with pytest.raises(ConfigError, match=r"hf:org/broken: cannot be loaded \(DatasetsError: no JSON\)"):
        list(read_lines("hf:org/broken"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=r"hf:org/name: the library `datasets` cannot be imported .* megatron_real\[hf\]"
    ):
        list(read_lines("hf:org/name"))


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "3"}\n\nx\n')
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    (tmp_path / "notes.txt").write_text("no data")
    options = DatasetOptions(batch_size=1, max_prompt_tokens=9)
    with pytest.raises(ConfigError, match=r"b\.jsonl: line 3: found 'x'"):
        Dataset.load(tmp_path, ByteTokenizer(), options)
    (tmp_path / "b.jsonl").write_text('{"prompt": "3"}\n')
    data = Dataset.load(tmp_path, ByteTokenizer(), options)
    assert [record.text for record in data.records] == ["1", "2", "3"]
