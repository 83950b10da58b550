import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.architecture import tensor_table
from generators.hyperparameters import Hyperparameters
from zoo.schema import (
    HYPERPARAMETER_NAMES,
    INDEX_PLACE,
    SCALARS,
    checkpoint_schema,
    index_schema,
    tensor_array,
    tensor_paths,
    tensor_type,
    tensor_values,
)

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def numbered(rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 [rows, *shape] in which every value is another."""
    return np.arange(rows * math.prod(shape), dtype=np.float32).reshape(rows, *shape)


class TestTensorColumns:
    @given(SHAPES, st.integers(1, 7), st.data())
    @settings(max_examples=60, deadline=None)
    def test_values_come_back_in_their_shape_from_any_slice(
        self, shape: tuple[int, ...], rows: int, data: st.DataObject
    ) -> None:
        values = numbered(rows, shape)
        array = tensor_array(values)
        start = data.draw(st.integers(0, rows))
        assert np.array_equal(tensor_values(array.slice(start), shape), values[start:])
        chunked = pa.chunked_array([array.slice(start), array.slice(0, start)])
        assert np.array_equal(tensor_values(chunked, shape), np.concatenate([values[start:], values[:start]]))

    def test_nested_lists_keep_rows_apart_from_columns(self) -> None:
        array = tensor_array(numbered(2, (2, 3)))
        assert array.to_pylist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]

    def test_no_rows(self) -> None:
        assert tensor_values(pa.chunked_array([], tensor_array(numbered(1, (2, 3))).type), (2, 3)).shape == (0, 2, 3)

    @pytest.mark.parametrize("task", ["mnist", "ag_news"])
    def test_arrays_have_the_declared_type(self, task: str) -> None:
        for spec in tensor_table(task):
            assert tensor_array(np.zeros((3, *spec.shape), np.float32)).type == tensor_type(spec)

    def test_arrays_share_memory_with_their_source(self) -> None:
        values = numbered(4, (2, 3))
        flat = tensor_array(values).flatten().flatten()
        assert np.shares_memory(flat.to_numpy(), values)
        assert np.shares_memory(tensor_values(tensor_array(values), (2, 3)), values)

    @pytest.mark.parametrize("task", ["mnist", "ag_news"])
    def test_paths_are_those_of_a_written_file(self, task: str, tmp_path: Path) -> None:
        columns = {spec.name: tensor_array(np.zeros((1, *spec.shape), np.float32)) for spec in tensor_table(task)}
        pq.write_table(pa.table(columns), tmp_path / "one.parquet")
        metadata = pq.read_metadata(tmp_path / "one.parquet").row_group(0)
        assert tensor_paths(task) == [metadata.column(i).path_in_schema for i in range(metadata.num_columns)]


class TestColumns:
    def test_names_that_stay(self) -> None:
        names = """
            run_id checkpoint_id task epoch_label epoch optimizer learning_rate init_std l2 dropout train_fraction seed
            initialisation epochs batch_size warmup_epochs min_learning_rate best_by data_digest stream_version engine
            device origin train_loss train_accuracy validation_loss validation_accuracy test_loss test_accuracy
            generalization_gap"""
        assert " ".join(column.name for column in SCALARS) == " ".join(names.split())
        assert index_schema().names[-5:] == ["status", "split", *INDEX_PLACE]

    def test_a_row_holds_all_hyperparameters(self) -> None:
        assert set(HYPERPARAMETER_NAMES) <= {column.name for column in SCALARS}
        types = {field: Hyperparameters.__dataclass_fields__[field].type for field in HYPERPARAMETER_NAMES}
        expected = {str: pa.string(), int: pa.int64(), float: pa.float64()}
        for column in SCALARS:
            if column.name in types:
                assert column.type == expected[types[column.name]], column.name

    def test_rates_are_doubles_so_that_they_match_what_one_types(self) -> None:
        table = pa.table({"learning_rate": pa.array([0.001], checkpoint_schema("mnist").field("learning_rate").type)})
        assert table["learning_rate"][0].as_py() == 0.001

    def test_tensors_have_state_dict_names_and_the_fixed_buffer_is_none(self) -> None:
        names = checkpoint_schema("mnist").names
        assert "encoder.1.attention.out_projection.weight" in names
        assert not any("pos_embedding" in name for name in names)
        assert not any(name.startswith("embedding") for name in checkpoint_schema("ag_news").names)
        assert len(names) - len(checkpoint_schema("ag_news").names) == 2
