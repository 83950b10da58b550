import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import zoo.plain_values
from generators.tasks.ag_news import AGNewsSource
from generators.tasks.mnist import MNISTSource
from zoo.config import SweepConfig, load_config, parse_config, presets
from zoo.errors import ConfigError

GOOD = {
    "task": "mnist",
    "epochs": 4,
    "save_epochs": [0, 2, "best"],
    "warmup_epochs": 1,
    "grid": [
        {
            "optimizer": ["adam"],
            "learning_rate": [0.01],
            "init_std": [0.2],
            "l2": [0],
            "dropout": [0.1],
            "train_fraction": [1.0],
        }
    ],
}


def write(folder: Path, content: dict | str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def grid(**changes: object) -> dict:
    return {"grid": [GOOD["grid"][0] | changes]}


def test_values_arrive_in_their_types(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    block = config.grid[0]
    assert (block.l2, type(block.l2[0])) == ((0.0,), float)
    assert (config.labels, config.batch_size, config.min_learning_rate) == (("0", "2", "best"), 128, 1e-5)
    assert (config.store.state_seconds, config.sweep.grace_seconds) == (300.0, 120.0)


def test_a_dict_is_a_configuration_too_and_stays_as_it_was(tmp_path: Path) -> None:
    content = copy.deepcopy(GOOD)
    config = load_config(content, ["epochs=6", "data.train_limit=100"])
    assert (config.epochs, config.data.train_limit) == (6, 100)
    assert config == load_config(write(tmp_path, GOOD), ["epochs=6", "data.train_limit=100"])
    assert content == GOOD
    with pytest.raises(ConfigError, match=r"^configuration: epochs: found 0, expected 1 or more$"):
        load_config(content | {"epochs": 0})


def test_a_configuration_made_by_hand_has_its_tasks_data() -> None:
    good = load_config(GOOD)
    assert SweepConfig(task="mnist", epochs=4, save_epochs=(0, 2, "best"), warmup_epochs=1, grid=good.grid) == good
    with pytest.raises(ConfigError, match=r"task: found 'cifar', expected one of mnist, ag_news"):
        dataclasses.replace(good, task="cifar")


@pytest.mark.parametrize("data", [{"train_limit": 64}, MNISTSource(train_limit=64)])
def test_data_made_by_hand_may_be_keys_or_a_source(data: Any) -> None:
    assert dataclasses.replace(load_config(GOOD), data=data).data == MNISTSource(train_limit=64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_limt": 64}, r"data.train_limt: unknown key; did you mean data.train_limit\?"),
        ({"train_limit": 0}, "data.train_limit: found 0, expected 1 or more"),
        ({"train_limit": "64"}, "data.train_limit: found '64', expected a whole number or nothing"),
        (3, "data: found 3, expected keys and values"),
        (AGNewsSource(), r"data: found AGNewsSource\(.*, expected keys and values"),
    ],
)
def test_other_data_made_by_hand_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        dataclasses.replace(load_config(GOOD), data=data)


def test_a_set_fills_a_group_that_stands_there_empty(tmp_path: Path) -> None:
    content = {key: value for key, value in GOOD.items() if key not in ("data", "store")}
    overrides = ["data.source=embedded", "store.state_seconds=5"]
    config = load_config(write(tmp_path, content | {"data": None, "store": None}), overrides)
    assert (config.data.source, config.store.state_seconds) == ("embedded", 5.0)
    with pytest.raises(ConfigError, match=r"--set grid\.x=1: grid is no group of keys"):
        load_config(write(tmp_path, GOOD), ["grid.x=1"])


def test_labels_are_sorted_as_numbers_with_best_last() -> None:
    assert parse_config(GOOD | {"epochs": 10, "save_epochs": ["best", 10, 2]}).labels == ("2", "10", "best")


def test_a_block_and_a_sweep_made_by_hand_have_the_ranges_of_a_run() -> None:
    good = load_config(GOOD)
    with pytest.raises(ConfigError, match=r"^learning_rate: found inf, expected numbers above 0$"):
        dataclasses.replace(good.grid[0], learning_rate=(1e-3, math.inf))
    with pytest.raises(ConfigError, match=rf"^seed: found {2**63}, expected whole numbers of 0 or more$"):
        dataclasses.replace(good.grid[0], seed=(2**63,))
    with pytest.raises(ConfigError, match=r"^min_learning_rate: found inf, expected a number of 0 or more$"):
        dataclasses.replace(good, min_learning_rate=math.inf)


def test_a_grid_of_more_runs_than_a_plan_can_hold_is_refused_from_its_lists() -> None:
    rates = [i / 1000 for i in range(1, 1001)]
    million = grid(learning_rate=rates, init_std=rates)
    assert load_config(GOOD | million).grid[0].size == 1_000_000
    one_more = {"grid": million["grid"] + GOOD["grid"]}
    product = grid(learning_rate=rates, init_std=rates, l2=rates, train_fraction=rates, seed=list(range(1000)))
    for change, found in ((one_more, 1_000_001), (product, 10**15)):
        message = f"configuration: grid: found {found} runs, expected at most 1000000; shorten its lists or split it"
        with pytest.raises(ConfigError, match=f"^{message}$"):
            load_config(GOOD | change)


BAD = [
    ({"epoch": 3}, "epoch: unknown key; did you mean epochs?"),
    ({"colour": 3}, "colour: unknown key; known keys: task, epochs"),
    ({"sweep": {"grace_second": 1}}, "sweep.grace_second: unknown key; did you mean sweep.grace_seconds?"),
    ({"data": {"sourse": "embedded"}}, "data.sourse: unknown key; did you mean data.source?"),
    ({"data": {"source": "web"}}, "data.source: found 'web', expected one of idx, torchvision, embedded"),
    ({"task": "cifar"}, "task: found 'cifar', expected one of mnist"),
    ({"task": ["mnist"]}, "task: found ['mnist'], expected one of mnist"),
    ({"epochs": 2**63}, "epochs: found a whole number of 64 bits, expected one that fits into 63 bits and a sign"),
    (grid(learning_rate=[10**400]), "grid[0].learning_rate[0]: found a whole number of 1329 bits"),
    ({"population_size": 2**63}, "population_size: found a whole number of 64 bits"),
    ({"epochs": "ten"}, "epochs: found 'ten', expected a whole number"),
    ({"epochs": 2.0}, "epochs: found 2.0, expected a whole number"),
    ({"epochs": True}, "epochs: found True, expected a whole number"),
    ({"epochs": 0, "warmup_epochs": 0}, "epochs: found 0, expected 1 or more"),
    ({"warmup_epochs": 5}, "warmup_epochs: found 5, expected 0 to epochs (4)"),
    ({"save_epochs": [0, 5]}, "save_epochs: found 5, expected epochs from 0 to epochs (4)"),
    ({"save_epochs": [2, 2]}, "save_epochs: found [2, 2], expected no epoch twice"),
    ({"save_epochs": []}, "save_epochs: found [], expected at least one epoch"),
    ({"save_epochs": ["last"]}, "save_epochs: found 'last', expected epochs from 0"),
    ({"min_learning_rate": float("nan")}, "min_learning_rate: found nan, expected a finite number"),
    ({"population_size": 0}, "population_size: found 0, expected auto or a whole number of 1 or more"),
    ({"best_by": "train"}, "best_by: found 'train', expected one of test, validation"),
    ({"engine": "jax"}, "engine: found 'jax', expected one of auto, torch, compiled, fused"),
    ({"store": {"state_seconds": -1}}, "store.state_seconds: found -1.0, expected 0 or more"),
    ({"sweep": {"gpus_per_population": 2}}, "sweep.gpus_per_population: found 2.0, expected more than 0, at most 1"),
    ({"grid": []}, "grid: found [], expected at least one block"),
    (grid(optimizer=["adamw"]), "grid[0].optimizer: found 'adamw', expected one of sgd, sgd_momentum, adam, rmsprop"),
    (grid(optimizer="adam"), "grid[0].optimizer: found 'adam', expected a list"),
    (grid(learning_rate=[]), "grid[0].learning_rate: found an empty list, expected at least one value"),
    (grid(learning_rate=[-0.1]), "grid[0].learning_rate: found -0.1, expected numbers above 0"),
    (grid(learning_rate=["fast"]), "grid[0].learning_rate[0]: found 'fast', expected a number"),
    (grid(dropout=[1.0]), "grid[0].dropout: found 1.0, expected rates in [0, 1)"),
    (grid(train_fraction=[0.0]), "grid[0].train_fraction: found 0.0, expected fractions in (0, 1]"),
    (grid(seed=[-1]), "grid[0].seed: found -1, expected whole numbers of 0 or more"),
    (grid(seed="abc"), "grid[0].seed: found 'abc', expected a list of whole numbers or nothing"),
    (grid(seed=[1, "abc"]), "grid[0].seed[1]: found 'abc', expected a whole number"),
    (grid(seed=[2**63]), "grid[0].seed[0]: found a whole number of 64 bits"),
    ({"population_size": 1.5}, "population_size: found 1.5, expected a whole number or text"),
    ({"save_epochs": 2}, "save_epochs: found 2, expected a list of whole numbers or texts"),
    ({"save_epochs": [True]}, "save_epochs[0]: found True, expected a whole number or text"),
    ({"grid": 3}, "grid: found 3, expected a list of groups of keys and values"),
    (grid(momentum=[0.9]), "grid[0].momentum: unknown key"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_configuration_is_one_line_with_file_and_field(change: dict, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD | change)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {key: value for key, value in GOOD.items() if key != "epochs"})
    with pytest.raises(ConfigError, match="epochs: missing; it has no default"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: mnist\nepochs: 3\nepochs: 4\n", "key 'epochs' stands twice, line 3"),
        ("? [epochs]\n: 3\n", "not valid YAML: while constructing a mapping in"),
        ("? {epochs: 3}\n: 3\n", "found unhashable key"),
        ("!!map [epochs]", "not valid YAML: expected a mapping node, but found sequence"),
        ("task: [mnist", "not valid YAML"),
        ("- mnist\n", "found list, expected keys and values"),
        ("", "found NoneType, expected keys and values"),
        ("batch_size: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ("batch_size: !!int abc", "not valid YAML: invalid literal for int()"),
        ("batch_size: !!int ''", "not valid YAML: string index out of range"),
        ("batch_size: !!bool abc", "not valid YAML: 'abc'"),
        ("batch_size: !!timestamp abc", "not valid YAML"),
        ('batch_size: "\\UFFFFFFFF"', "not valid YAML: Python int too large"),
        ("batch_size: 1" + ":00" * 200 + ".0", "not valid YAML: int too large to convert to float"),
        ("task: [0x" + "f" * 9000 + "]", "number of 9002 characters, line 1, expected at most 1000"),
        ("[" * 5000, "not valid YAML: maximum recursion depth exceeded"),
        ("task: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    ],
)
def test_broken_yaml_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_alias_stands_for_its_value(tmp_path: Path) -> None:
    one = "{optimizer: [adam], learning_rate: &rates [0.1, 0.2], init_std: *rates, l2: [0], dropout: *none"
    text = f"task: mnist\nepochs: 1\nsave_epochs: &none [0]\ngrid: [{one}, train_fraction: [1.0]}}]\n"
    (block,) = load_config(write(tmp_path, text)).grid
    assert (block.learning_rate, block.init_std, block.dropout) == ((0.1, 0.2), (0.1, 0.2), (0.0,))


def test_aliases_that_stand_for_too_much_and_merge_keys_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 60)]
    for text, message in (
        ("\n".join([*lines, "task: *a59"]), "with its aliases written out, found more than 1000000 values"),
        ("task: &a [*a]", "with its aliases written out, found more than 1000000 values"),
        ("task: mnist\n<<: {epochs: 3}\n", "merge key <<, line 2: no merge keys here; write the keys themselves"),
    ):
        path = write(tmp_path, text)
        with pytest.raises(ConfigError, match=f"^{path}: not valid YAML: {message}$"):
            load_config(path)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": LONG}, f"task: found '{LONG[:199]}..., expected one of mnist, ag_news"),
        ({"epochs": LONG}, f"epochs: found '{LONG[:199]}..., expected a whole number"),
        ({"engine": LONG}, f"engine: found '{LONG[:199]}..., expected one of"),
        ({"store": LONG}, f"store: found '{LONG[:199]}..., expected keys and values"),
        ({"save_epochs": [2] * 1000}, f"save_epochs: found {str([2] * 1000)[:200]}..., expected no epoch twice"),
        ({LONG: 1}, f"{LONG[:200]}...: unknown key; known keys"),
        ({"two\nlines": 1}, "two lines: unknown key; known keys"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_what_a_message_quotes_is_cut(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(write(tmp_path, GOOD | change))
    assert "\n" not in str(caught.value)


def test_what_the_yaml_parser_says_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path, f"epochs: !!bool {LONG}")
    with pytest.raises(ConfigError, match=f"^{path}: not valid YAML: '{LONG[:599]}\\.\\.\\.$"):
        load_config(path)


class Key(str):
    """A key that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return super().__eq__(other)


def test_a_file_of_many_keys_is_read_without_comparing_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo.plain_values._Loader, "construct_scalar", lambda _, node: Key(node.value))
    path = write(tmp_path, "{" + ", ".join(f"key{i}: 0" for i in range(500)) + "}")
    with pytest.raises(ConfigError, match="task: found None"):
        load_config(path)
    assert Key.compared < 5000  # 500 * 500 for pairs


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", "+1e-3", "0.001", ".1e-2"])
def test_numbers_with_an_exponent_are_numbers(number: str, tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD) + f"min_learning_rate: {number}\n"
    assert load_config(write(tmp_path, text)).min_learning_rate == 0.001


def test_set_takes_any_key_and_reads_its_value_as_yaml(tmp_path: Path) -> None:
    overrides = [
        "epochs=6",
        "min_learning_rate=1e-4",
        "save_epochs=[0, 6, best]",
        "data.source=embedded",
        "data.train_limit=100",
        "store.state_seconds=5",
        "grid=[{optimizer: [sgd], learning_rate: [1e-1], init_std: [1], l2: [0], dropout: [0], train_fraction: [1]}]",
    ]
    config = load_config(write(tmp_path, GOOD), overrides)
    assert (config.epochs, config.min_learning_rate, config.labels) == (6, 1e-4, ("0", "6", "best"))
    assert (config.data.source, config.data.train_limit, config.store.state_seconds) == ("embedded", 100, 5.0)
    assert (config.grid[0].optimizer, config.grid[0].learning_rate) == (("sgd",), (0.1,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", "--set epochs: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("epoch=3", "epoch: unknown key; did you mean epochs?"),
        ("epochs.x=3", "--set epochs.x=3: epochs is no group of keys"),
        ("epochs=[", "--set epochs=[: the value is not valid YAML"),
        ("data.source=2020-99-99", "--set data.source=2020-99-99: the value is not valid YAML: month must be in 1..12"),
        ("epochs=", "epochs: found None, expected a whole number"),
    ],
)
def test_a_bad_set_is_one_line(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(write(tmp_path, GOOD), [override])
    assert "\n" not in str(caught.value)


def test_a_name_that_is_neither_file_nor_preset_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"mnits: no such file or preset; presets: .*mnist.*quickstart"):
        load_config("mnits")


@pytest.mark.parametrize("name", ["m" * 3000, "mnist\0", "m" * 3000 + ".yaml", "mnist\0.yaml"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file or preset|cannot be read"):
        load_config(name)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_a_sweep(preset: str) -> None:
    config = load_config(preset)
    assert config.epochs >= config.warmup_epochs
    assert "best" in config.labels
