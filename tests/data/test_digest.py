"""The digest of a data set is that of its rows, wherever they lie."""

from __future__ import annotations

from datasets import Dataset, concatenate_datasets

from groupgrad.data import columns as digest
from groupgrad.data.columns import dataset_digest


def rows(count: int = 2500) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i}?" for i in range(count)], "answer": [[i, i + 1] for i in range(count)]})


def test_the_content_counts_and_its_order(tmp_path):
    first = dataset_digest(rows())
    assert first is not None and first["rows"] == 2500
    rows().save_to_disk(str(tmp_path / "saved"))
    assert dataset_digest(Dataset.load_from_disk(str(tmp_path / "saved"))) == first
    chunks = concatenate_datasets([rows().select(range(700)), rows().select(range(700, 2500))])
    assert dataset_digest(chunks) == first
    changed = rows().map(lambda row: {"answer": [0, 0] if row["prompt"] == "1999?" else row["answer"]})
    for other in (changed, rows().select(range(2499)), rows().shuffle(seed=0), rows().rename_column("answer", "a")):
        assert dataset_digest(other) != first
    assert dataset_digest(rows().to_iterable_dataset()) is None
    assert dataset_digest([{"prompt": "a"}]) is None


def test_a_long_data_set_is_read_at_even_distances(monkeypatch):
    monkeypatch.setattr(digest, "DIGEST_ROWS", 100)
    first = dataset_digest(rows())
    assert dataset_digest(rows().select([*range(1, 2500), 0])) != first
    assert first == dataset_digest(rows()) and first is not None and first["rows"] == 2500
