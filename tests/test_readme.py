"""What the README shows: its commands parse, its presets exist, its configuration is one, its names are real."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import zoo
from zoo import cli
from zoo.config import parse_config, presets

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def shell_commands() -> list[str]:
    lines = "\n".join(body for kind, body in BLOCKS if kind == "sh").replace("\\\n", " ").splitlines()
    commands = [line[line.index("zoo ") :].split(" #")[0].split(" & ")[0].strip() for line in lines if "zoo " in line]
    return [command for command in commands if command.startswith("zoo ")]


@pytest.mark.parametrize("command", shell_commands())
def test_commands_parse(command: str) -> None:
    cli.parser().parse_args(shlex.split(command)[1:])


def test_there_are_commands_of_every_kind() -> None:
    verbs = {shlex.split(command)[1] for command in shell_commands()}
    assert {"plan", "generate", "build", "verify", "select", "evaluate", "rerun", "publish", "nfn"} <= verbs


def test_the_presets_named_are_those_that_ship() -> None:
    named = re.search(r"or a preset: (.*?)\.\n", README, re.DOTALL)
    assert named is not None
    assert sorted(re.findall(r"`(\w+)`", named.group(1))) == presets()


def test_the_configuration_shown_is_one() -> None:
    (text,) = [body for kind, body in BLOCKS if kind == "yaml" and "grid:" in body]
    config = parse_config(yaml.safe_load(re.sub(r"(\d)e-", r"\1.0e-", text)))
    assert config.grid[0].seed == (3, 4)


def test_python_names_exist() -> None:
    names = set(re.findall(r"\bzoo\.([a-z_]+)\(", README))
    assert names
    assert names <= set(zoo.__all__)


def test_links_lead_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= headings
