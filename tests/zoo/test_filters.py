from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from dataset_tools import ids
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.dataset import Zoo, open_zoo
from zoo.errors import DatasetError
from zoo.filters import expression, parse_filter

pytest_plugins = ["dataset_fixtures"]


class TestFilters:
    def conditions(self, frame: pd.DataFrame) -> list[tuple[list, pd.Series]]:
        accuracy = float(frame.test_accuracy.median())
        return [
            ([("learning_rate", "==", 0.003)], frame.learning_rate == 0.003),
            ([("learning_rate", "=", "3e-3")], frame.learning_rate == 0.003),
            ([("epoch_label", "==", 1)], frame.epoch_label == "1"),
            ([("epoch", "<=", "1")], frame.epoch <= 1),
            ([("optimizer", "in", ["sgd", "adam"])], frame.optimizer.isin(["sgd", "adam"])),
            ([("optimizer", "not in", ("sgd", "adam"))], ~frame.optimizer.isin(["sgd", "adam"])),
            ([("optimizer", "in", [])], frame.optimizer == "none"),
            ([("epoch", "<", 1.5)], frame.epoch < 1.5),
            ([("epoch", "in", (0, 2))], frame.epoch.isin([0, 2])),
            ([("train_accuracy", "!=", 2)], frame.train_accuracy.notna()),
            (
                [("test_accuracy", ">", accuracy), ("epoch_label", "!=", "best")],
                (frame.test_accuracy > accuracy) & (frame.epoch_label != "best"),
            ),
            (
                [[("test_accuracy", ">", accuracy)], [("seed", "==", 3), ("init_std", "<", 0.25)]],
                (frame.test_accuracy > accuracy) | (frame.init_std < 0.25),
            ),
        ]

    def test_mean_what_pandas_means(self, zoo: Zoo, frame: pd.DataFrame) -> None:
        for filters, chosen in self.conditions(frame):
            expected = frame[chosen & frame.file.notna()]
            assert ids(zoo.checkpoints(filters=filters)) == expected.checkpoint_id.tolist(), filters

    def test_mean_what_datasets_means(self, dataset: Path, zoo: Zoo, frame: pd.DataFrame, hf_cache: Path) -> None:
        for filters, _ in self.conditions(frame)[-2:]:
            found = load_dataset(str(dataset), "mnist", split="train", streaming=True, filters=filters)
            found = found.select_columns(["checkpoint_id"])
            assert [row["checkpoint_id"] for row in found] == ids(zoo.checkpoints(split="train", filters=filters))

    @pytest.mark.parametrize(
        ("filters", "message"),
        [
            ([("accuracy", ">", 0.5)], "filters: found 'accuracy', expected one of run_id, "),
            ([("test_accuracy", "=>", 0.5)], "filters: test_accuracy: operator: found '=>', expected one of =="),
            ([("test_accuracy", ">", "high")], "filters: test_accuracy: found 'high', expected a value of type double"),
            ([("epoch", "==", "1.5")], "filters: epoch: found '1.5', expected a value of type int64"),
            ([("test_accuracy", ">", None)], "filters: test_accuracy: found None, expected a value of type double"),
            ([("optimizer", "==", True)], "filters: optimizer: found True, expected a value of type string"),
            ([("test_accuracy", ">", [1])], "filters: test_accuracy: found \\[1\\], expected a value of type double"),
            (
                [("test_accuracy", "==", float("nan"))],
                "filters: test_accuracy: found nan, expected a value of type double",
            ),
            ("test_accuracy>nan", "filters: test_accuracy: found nan, expected a value of type double"),
            ([("test_accuracy", "in", [0.5, float("nan")])], "filters: test_accuracy: found nan, expected a value of"),
            ([("seed", "in", 3)], "filters: seed in: found 3, expected a list of values"),
            ("optimizer in adam,sdg", "filters: optimizer: found 'sdg', which no row has, expected one of adam, "),
            (
                [("epoch_label", "in", [0, 50])],
                "filters: epoch_label: found '50', which no row has, expected one of 0,",
            ),
            ([("optimizer", "in", "adam")], "filters: optimizer in: found the text 'adam', expected a list of values"),
            ("test_acuracy>0.5", r"filters: found 'test_acuracy', expected .*; did you mean test_accuracy\?"),
            ("accuracy", "filter 'accuracy': expected column, operator and value"),
            (
                {"optimizer": "adam"},
                r'filters: found \{.*\}, expected conditions, for example \[\("test_accuracy", ">=',
            ),
            ([("epoch", "==")], "filter 'epoch': expected column, operator and value"),
            ([[]], "expected conditions, for example"),
            ([("epoch", "==", 1), [("epoch", "==", 2)]], "expected conditions, for example"),
            (0.5, "found 0.5, expected conditions, for example"),
            (
                "optimizer==adamw",
                "filters: optimizer: found 'adamw', which no row has, expected one of adam, rmsprop, sgd, sgd_momentum",
            ),
            ([("epoch_label", "=", 50)], "filters: epoch_label: found '50', which no row has, expected one of 0, 1, "),
        ],
    )
    def test_mistakes_are_named(self, zoo: Zoo, filters: Any, message: str) -> None:
        with pytest.raises(DatasetError, match=message):
            zoo.checkpoints(filters=filters)

    @pytest.mark.parametrize(
        "filters",
        [
            "optimizer == adam",
            ("optimizer", "==", "adam"),
            ["optimizer in adam", ("epoch", ">=", 0)],
            ("optimizer==adam", "epoch>=0", "epoch<9"),
            [["optimizer==adam", "epoch<1"], [("optimizer", "==", "adam"), "epoch>0"]],
        ],
    )
    def test_texts_tuples_and_lists_of_them_choose_the_same(self, zoo: Zoo, filters: Any) -> None:
        chosen = zoo.checkpoints(filters=filters)
        assert len(chosen) > 0
        assert ids(chosen) == ids(zoo.checkpoints(filters=[("optimizer", "==", "adam")]))

    def test_a_value_that_no_row_has_is_no_mistake_among_numbers_and_many_texts(self, zoo: Zoo) -> None:
        for column in ("learning_rate", "checkpoint_id", "optimizer"):
            for operator in ("!=", "not in") if column == "optimizer" else ("==", " in "):
                zoo.checkpoints(filters=f"{column} {operator} 7")

    @pytest.mark.parametrize(
        ("text", "condition"),
        [
            ("test_accuracy>=0.9", ("test_accuracy", ">=", "0.9")),
            ("epoch_label == best", ("epoch_label", "==", "best")),
            ("epoch=0", ("epoch", "=", "0")),
            ("l2<1e-6", ("l2", "<", "1e-6")),
            ("status!=diverged", ("status", "!=", "diverged")),
            ("optimizer in adam, sgd", ("optimizer", "in", ["adam", "sgd"])),
            ("optimizer not in adam", ("optimizer", "not in", ["adam"])),
        ],
    )
    def test_texts(self, text: str, condition: tuple[str, str, Any]) -> None:
        assert parse_filter(text) == condition

    @pytest.mark.parametrize("text", ["", "best", "epoch_label==", ">=0.5", "a~b"])
    def test_texts_that_are_no_condition(self, text: str) -> None:
        with pytest.raises(DatasetError, match="expected column, operator and value"):
            parse_filter(text)

    @given(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.floats(0, 1))
    @settings(max_examples=30, deadline=None)
    def test_texts_and_numbers_choose_the_same(self, grouped: Path, operator: str, value: float) -> None:
        index = open_zoo(grouped).index
        zoo = Zoo.__new__(Zoo)
        zoo.__dict__ |= {"index": index, "_files": {"mnist": ["a"], "index": ["b"]}}
        by_text = zoo.checkpoints(filters=[parse_filter(f"test_accuracy{operator}{value!r}")])
        assert ids(by_text) == ids(zoo.checkpoints(filters=[("test_accuracy", operator, value)]))


@pytest.mark.parametrize("value", ["9" * 30, 10**30, -(10**30)])
def test_a_number_that_no_column_can_hold_is_refused(value: str | int) -> None:
    with pytest.raises(DatasetError, match=r"epoch: found .*, expected a value of type int64"):
        expression([("epoch", "==", value)], pa.schema([("epoch", pa.int64())]))
