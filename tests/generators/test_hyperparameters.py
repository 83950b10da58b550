"""Hyperparameters: the name of a run is fixed for ever, and bad values are refused by name."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generators.errors import InputError
from generators.hyperparameters import Hyperparameters

CANONICAL = (
    '{"batch_size":50,"best_by":"test","data_digest":"0123456789abcdef","dropout":0.0,"epochs":4,"init_std":0.2,'
    '"initialisation":"per_run","l2":0.0001,"learning_rate":0.003,"min_learning_rate":1e-05,"optimizer":"adam",'
    '"seed":3,"stream_version":1,"task":"mnist","train_fraction":1.0,"warmup_epochs":2}'
)
OTHER_VALUES = {
    "task": "ag_news",
    "optimizer": "sgd",
    "learning_rate": 0.0030000000000000005,
    "init_std": 0.3,
    "l2": 0,
    "dropout": 0.05,
    "train_fraction": 0.9,
    "seed": 4,
    "epochs": 5,
    "batch_size": 51,
    "warmup_epochs": 1,
    "min_learning_rate": 0,
    "best_by": "validation",
    "initialisation": "shared",
    "data_digest": "0123456789abcdee",
    "stream_version": 2,
}
BAD_VALUES = [
    ("task", "cifar"),
    ("task", None),
    ("optimizer", "adamw"),
    ("optimizer", "Adam"),
    ("learning_rate", 0),
    ("learning_rate", -1e-3),
    ("learning_rate", math.inf),
    ("learning_rate", math.nan),
    ("learning_rate", "0.1"),
    ("learning_rate", True),
    ("init_std", 0.0),
    ("init_std", math.nan),
    ("l2", -1e-9),
    ("l2", math.inf),
    ("dropout", -0.1),
    ("dropout", 1),
    ("dropout", math.nan),
    ("train_fraction", 0),
    ("train_fraction", 1.01),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 3.0),
    ("seed", [3]),
    ("epochs", 0),
    ("epochs", 4.0),
    ("batch_size", 0),
    ("batch_size", True),
    ("warmup_epochs", -1),
    ("warmup_epochs", 5),
    ("l2", 10**400),
    ("learning_rate", -(10**400)),
    ("min_learning_rate", -1e-9),
    ("min_learning_rate", math.nan),
    ("best_by", "train"),
    ("initialisation", "zeros\nand more"),
    ("data_digest", 7),
    ("stream_version", "1"),
]
rates = st.floats(min_value=1e-300, max_value=1e300)


def test_run_id_and_canonical_json_are_golden(make_run):
    run = make_run()
    assert run.canonical_json() == CANONICAL
    assert run.run_id == "257704f7ce6b4c6a"


def test_equal_settings_have_one_run_id(make_run):
    whole = make_run(l2=0, dropout=0, train_fraction=1, learning_rate=1, min_learning_rate=0)
    fractional = make_run(l2=-0.0, dropout=-0.0, train_fraction=1.0, learning_rate=1.0, min_learning_rate=-0.0)
    assert whole == fractional
    assert whole.canonical_json() == fractional.canonical_json()
    assert type(whole.l2) is float and math.copysign(1, fractional.l2) == 1


def test_every_field_changes_the_run_id(make_run):
    assert OTHER_VALUES.keys() == {field.name for field in dataclasses.fields(Hyperparameters)}
    ids = {make_run(**{name: value}).run_id for name, value in OTHER_VALUES.items()} | {make_run().run_id}
    assert len(ids) == len(OTHER_VALUES) + 1


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_bad_value_is_one_line_that_names_the_field(make_run, field: str, value: Any):
    with pytest.raises(InputError, match=rf"^{field}: found .*, expected \S+") as error:
        make_run(**{field: value})
    assert "\n" not in str(error.value)
    assert repr(value) in str(error.value)


def test_runs_cannot_be_changed(make_run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_run().learning_rate = 1.0


@pytest.mark.parametrize("warmup_epochs", [0, 4])
def test_warmup_may_be_absent_or_fill_the_training(make_run, warmup_epochs: int):
    assert make_run(warmup_epochs=warmup_epochs).warmup_epochs == warmup_epochs


@given(rate=rates, std=rates, l2=rates, dropout=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 2**63 - 1))
def test_json_round_trip_keeps_every_bit(make_run, rate: float, std: float, l2: float, dropout: float, seed: int):
    run = make_run(learning_rate=rate, init_std=std, l2=l2, dropout=dropout, seed=seed)
    again = Hyperparameters(**json.loads(run.canonical_json()))
    assert again == run
    assert again.run_id == run.run_id
    assert Hyperparameters(**run.to_dict()) == run
