"""The package's own names: the verbs of the command line, in Python."""

import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zoo
from zoo.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", zoo.__all__)
def test_every_name_is_a_function_or_class_also_after_its_module_was_imported(name: str) -> None:
    # A submodule of the same name would take the attribute's place at its import.
    assert name not in {module.name for module in pkgutil.iter_modules(zoo.__path__)}
    assert inspect.isfunction(getattr(zoo, name)) or inspect.isclass(getattr(zoo, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'genrate'"):
        zoo.genrate  # noqa: B018


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.__version__ == importlib.metadata.version("small-transformer-zoo")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"zoo {zoo.__version__}\n"


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, zoo, zoo.cli; sys.exit(bool({'torch', 'ray', 'datasets', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_wheel_carries_every_package_and_the_files_beside_their_code() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = setuptools["package-dir"]
    folders = {path.parent.relative_to(ROOT) for top in ("zoo", "generators") for path in (ROOT / top).rglob("*.py")}
    assert sorted(setuptools["packages"]) == sorted({".".join(folder.parts) for folder in folders} | moved.keys())
    listed = set()
    for package, patterns in setuptools["package-data"].items():
        folder = ROOT / moved.get(package, package.replace(".", "/"))
        listed |= {path for pattern in patterns for path in folder.glob(pattern)}
    tops = (ROOT / "zoo", ROOT / "generators", ROOT / "configs", ROOT / "cards")
    beside = {path for top in tops for path in top.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert listed == {path for path in beside if not path.name.startswith(".")}
