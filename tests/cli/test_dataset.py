"""Loading of the command's data sets, and conversion of their rows."""

from __future__ import annotations

import json

import datasets
import pytest

from groupgrad.apps.cli.arguments import TaskArguments
from groupgrad.apps.cli.dataset import conversation, load_splits, load_test_split, prepare

ROWS = [
    {"question": "1+1?", "answer": "one and one\n#### 2"},
    {"question": "2+2?", "answer": "two and two\n####  4 "},
    {"question": "3+3?", "answer": "three\n#### 6"},
]
GSM8K = {"prompt_column": "question", "solution_column": "answer", "solution_pattern": r"####\s*(.+)"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def test_gsm8k_rows_become_chat_prompts_with_a_solution(file):
    train, evaluation = load_splits(TaskArguments(dataset_name=str(file), **GSM8K), evaluate=False)
    assert evaluation is None
    assert train.column_names == ["answer", "prompt", "solution"]
    assert train[1] == {
        "answer": ROWS[1]["answer"],
        "prompt": [{"role": "user", "content": "2+2?"}],
        "solution": "4",
    }


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_other_files(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    getattr(datasets.Dataset.from_list(ROWS), f"to_{suffix}")(str(path))
    train, _ = load_splits(TaskArguments(dataset_name=str(path), prompt_column="question"), evaluate=False)
    assert [row["prompt"][0]["content"] for row in train] == ["1+1?", "2+2?", "3+3?"]


def test_a_saved_folder_has_splits(tmp_path):
    splits = {"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    script = TaskArguments(dataset_name=str(tmp_path / "saved"), **GSM8K)
    train, evaluation = load_splits(script, evaluate=True)
    assert (train["solution"][:], evaluation["solution"][:]) == (["2", "4"], ["6"])
    script.dataset_test_split = "validation"
    with pytest.raises(ValueError, match="dataset_test_split='validation'"):
        load_splits(script, evaluate=True)


def test_a_folder_of_files_is_a_data_set_too(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    datasets.Dataset.from_list(ROWS).to_json(str(folder / "train.jsonl"))
    train, _ = load_splits(TaskArguments(dataset_name=str(folder), prompt_column="question"), evaluate=False)
    assert len(train) == 3


def test_an_evaluation_file(file, tmp_path):
    other = tmp_path / "test.jsonl"
    other.write_text(json.dumps(ROWS[2]))
    script = TaskArguments(dataset_name=str(file), dataset_test_name=str(other), **GSM8K)
    assert load_splits(script, evaluate=True)[1]["solution"][:] == ["6"]
    script.dataset_test_name = None
    with pytest.raises(ValueError, match="set dataset_test_name to the file"):
        load_splits(script, evaluate=True)


def test_several_evaluation_sets_have_names(file, tmp_path):
    for name, rows in (("easy", ROWS[:1]), ("hard", ROWS[1:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = [f"easy={tmp_path}/easy.jsonl", f"hard={tmp_path}/hard.jsonl"]
    script = TaskArguments(dataset_name=str(file), dataset_test_name=names, **GSM8K)
    found = load_splits(script, evaluate=True)[1]
    assert {name: len(rows) for name, rows in found.items()} == {"easy": 1, "hard": 2}
    assert {name: len(rows) for name, rows in load_test_split(script, limit=1).items()} == {"easy": 1, "hard": 1}
    for given in (names + names[:1], [names[0], str(file)]):
        script.dataset_test_name = given
        with pytest.raises(ValueError, match=r"has several sets.*give each a name of its own"):
            load_splits(script, evaluate=True)


def test_streaming_and_few_rows(file):
    script = TaskArguments(dataset_name=str(file), max_train_rows=2, **GSM8K)
    assert len(load_splits(script, evaluate=False)[0]) == 2
    script.dataset_streaming = True
    train, _ = load_splits(script, evaluate=False)
    assert isinstance(train, datasets.IterableDataset)
    assert [row["solution"] for row in train] == ["2", "4"]


def test_text_prompts_stay_text_by_default():
    plain = datasets.Dataset.from_list([{"prompt": "a"}])
    assert prepare(plain, TaskArguments())[0] == {"prompt": "a"}
    assert prepare(plain, TaskArguments(conversational=True))[0]["prompt"] == [{"role": "user", "content": "a"}]
    with_system = prepare(plain, TaskArguments(system_prompt="be brief"))[0]["prompt"]
    assert [m["role"] for m in with_system] == ["system", "user"]
    renamed = datasets.Dataset.from_list([{"question": "a"}])
    assert prepare(renamed, TaskArguments(prompt_column="question", conversational=False))[0] == {"prompt": "a"}


def test_messages_keep_their_own_system_prompt():
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]
    assert conversation(own, "other") == own
    assert conversation(own[1:], "other")[0] == {"role": "system", "content": "other"}
    assert conversation(own, None) == own


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompt_column": "quest"}, "no column 'quest', only question, answer; set prompt_column"),
        ({}, "no column 'prompt', only question, answer; set prompt_column to one of them"),
        ({**GSM8K, "solution_column": "solution"}, "no column 'solution'.*set solution_column"),
        ({"prompt_column": "question", "solution_pattern": "(a)"}, "no column to search; set solution_column"),
        ({**GSM8K, "solution_pattern": "####"}, "has no group"),
        ({**GSM8K, "solution_pattern": "(("}, "is not a regular expression"),
        ({**GSM8K, "solution_pattern": r"\$\$ (.+)"}, "is not found in the answer 'one and one"),
        ({**GSM8K, "conversational": False, "system_prompt": "x"}, "set conversational to True"),
    ],
)
def test_rows_that_do_not_fit(settings, text, file):
    with pytest.raises(ValueError, match=text):
        load_splits(TaskArguments(dataset_name=str(file), **settings), evaluate=False)


def test_missing_data_sets():
    with pytest.raises(FileNotFoundError, match=r"nowhere.jsonl"):
        load_splits(TaskArguments(dataset_name="nowhere.jsonl"), evaluate=False)
    with pytest.raises(ValueError, match="no data set is given; set dataset_name"):
        load_splits(TaskArguments(), evaluate=False)
