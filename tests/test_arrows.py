"""Who may import whom: the two floors, and the arrows between the modules of the upper one.

Arrows point one way, from the command line down to the ground floor; a module may import what its arrows lead to, at
once or over other arrows. A file that has no arrows of its own belongs to those that import it, and counts as theirs.
Imports are read from the syntax tree, so those inside functions count too.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARROWS: dict[str, set[str]] = {
    "zoo.config": set(),
    "zoo.plan": {"zoo.config"},
    "zoo.store": {"zoo.plan"},
    "zoo.threads": set(),
    "zoo.worker": {"zoo.plan", "zoo.store", "zoo.threads", "generators.engines"},
    "zoo.cluster": set(),
    "zoo.bench": {"zoo.plan", "zoo.threads", "generators.engines"},
    "zoo.sweep": {"zoo.bench", "zoo.cluster", "zoo.worker", "zoo.plan", "zoo.store"},
    "zoo.shards": {"zoo.plan", "zoo.store", "zoo.threads"},
    "zoo.card": {"zoo.shards"},
    "zoo.hub": set(),
    "zoo.verify_sweep": {"zoo.plan", "zoo.store", "zoo.shards"},
    "zoo.dataset": {"zoo.shards", "zoo.threads"},
    "zoo.evaluation": {"zoo.dataset", "zoo.threads", "generators.engines"},
    "zoo.release": {"zoo.plan", "zoo.store"},
    "zoo.nfn.weight_space": {"zoo.dataset"},
    "zoo.nfn.layers": {"zoo.dataset"},
    "zoo.nfn.predictors": {"zoo.dataset"},
    "zoo.nfn.train": {"zoo.dataset"},
    "zoo.nfn.benchmark": {"zoo.dataset", "zoo.cluster"},
}
"""Errors and the definitions of the ground floor are open to all; its engines, which train, are not."""
SIBLINGS = "zoo.nfn."
"""Modules of this package may import each other."""
HUB_WRITES = {
    "create_branch",
    "create_commit",
    "create_repo",
    "create_tag",
    "delete_branch",
    "delete_file",
    "delete_files",
    "delete_folder",
    "delete_repo",
    "delete_tag",
    "metadata_update",
    "move_repo",
    "preupload_lfs_files",
    "push_to_hub",
    "super_squash_history",
    "update_repo_settings",
    "update_repo_visibility",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
}


def module_files(root: Path) -> dict[str, Path]:
    """Module name -> file, for all Python files of the two packages."""
    files = {}
    for package in ("zoo", "generators"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files(ROOT)


def imported_names(source: str, module: str, is_package: bool = False) -> set[str]:
    """Full names that a module imports, as written: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                package = parts[: len(parts) - node.level + is_package]
                base = ".".join([*package, *([base] if base else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def own_imports(module: str, files: dict[str, Path]) -> set[str]:
    """Modules of the two packages that a module imports; a package that is only on the way to another is left out."""
    path = files[module]
    names = imported_names(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    found = {name for name in names if name in files}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def outside_imports(module: str, files: dict[str, Path]) -> set[str]:
    path = files[module]
    names = imported_names(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    return {name.split(".")[0] for name in names if name}


def led_to(module: str, arrows: dict[str, set[str]]) -> set[str]:
    """All that the arrows of a module lead to."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = arrows.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def closed_targets(module: str, files: dict[str, Path], arrows: dict[str, set[str]]) -> dict[str, list[str]]:
    """Modules with arrows (and engines) that a module reaches, each with the way over modules without arrows."""
    reached: dict[str, list[str]] = {}
    waiting = [[module]]
    seen = {module}
    while waiting:
        way = waiting.pop()
        for name in own_imports(way[-1], files) - seen:
            seen.add(name)
            if name.startswith("generators"):
                if f"{name}.".startswith("generators.engines."):
                    reached["generators.engines"] = [*way, name]
            elif name in arrows:
                reached[name] = [*way, name]
            else:
                waiting.append([*way, name])
    return reached


def violations(module: str, files: dict[str, Path], arrows: dict[str, set[str]]) -> list[str]:
    allowed = led_to(module, arrows)
    if module.startswith(SIBLINGS):
        allowed |= {name for name in arrows if name.startswith(SIBLINGS)} - {"zoo.nfn.benchmark"}
    reached = closed_targets(module, files, arrows)
    return [" -> ".join(way) for name, way in sorted(reached.items()) if name not in allowed]


def without_extension(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name == prefix or name.startswith(f"{prefix}.")]


def test_the_tree_is_there():
    assert {"zoo.plan", "zoo.errors", "generators.population", "generators.tasks.mnist"} <= FILES.keys()


@pytest.mark.parametrize("module", without_extension(FILES, "generators"))
def test_the_ground_floor_never_looks_up(module: str):
    outside = outside_imports(module, FILES)
    assert "zoo" not in outside
    assert not outside & {"ray", "huggingface_hub", "pyarrow", "yaml"}


@pytest.mark.parametrize("module", [name for name in ARROWS if name in FILES])
def test_imports_follow_the_arrows(module: str):
    assert violations(module, FILES, ARROWS) == []


def test_arrows_make_no_circle():
    for module in ARROWS:
        assert module not in led_to(module, ARROWS)


@pytest.mark.parametrize("module", [name for name in FILES if name != "zoo.cluster"])
def test_only_the_cluster_imports_ray(module: str):
    assert "ray" not in outside_imports(module, FILES)


@pytest.mark.parametrize("module", [name for name in FILES if name != "zoo.hub"])
def test_only_the_hub_module_writes_to_the_hub(module: str):
    assert hub_writes(FILES[module].read_text(encoding="utf-8")) == set()


def test_errors_import_no_part_of_the_upper_floor():
    assert own_imports("zoo.errors", FILES) == {"generators.errors"}
    assert own_imports("generators.errors", FILES) == set()


def hub_writes(source: str) -> set[str]:
    """Names of writing Hub functions that a source uses, called or not."""
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return used & HUB_WRITES


# The check itself


def write_tree(root: Path, sources: dict[str, str]) -> dict[str, Path]:
    for name, source in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return module_files(root)


def test_a_forbidden_import_is_found_wherever_it_hides(tmp_path: Path):
    files = write_tree(
        tmp_path,
        {
            "zoo/__init__.py": "",
            "zoo/plan.py": "def f():\n    from zoo import store\n",
            "zoo/store.py": "import zoo.helper",
            "zoo/helper.py": "from .deeper import thing",
            "zoo/deeper.py": "from generators.engines.torch_engine import TorchEngine",
            "zoo/config.py": "from importlib import import_module\nimport_module('zoo.plan')",
            "generators/__init__.py": "",
            "generators/engines/__init__.py": "",
            "generators/engines/torch_engine.py": "",
        },
    )
    assert violations("zoo.plan", files, ARROWS) == ["zoo.plan -> zoo.store"]
    assert violations("zoo.store", files, ARROWS) == [
        "zoo.store -> zoo.helper -> zoo.deeper -> generators.engines.torch_engine"
    ]
    assert violations("zoo.config", files, ARROWS) == ["zoo.config -> zoo.plan"]


def test_allowed_imports_pass(tmp_path: Path):
    files = write_tree(
        tmp_path,
        {
            "zoo/__init__.py": "",
            "zoo/worker.py": "from generators.engines import base\nfrom zoo.config import x\nimport zoo.store",
            "zoo/store.py": "from . import plan",
            "zoo/plan.py": "",
            "zoo/config.py": "",
            "generators/engines/__init__.py": "",
            "generators/engines/base.py": "",
        },
    )
    assert own_imports("zoo.worker", files) == {"generators.engines.base", "zoo.config", "zoo.store"}
    assert own_imports("zoo.store", files) == {"zoo.plan"}
    assert violations("zoo.worker", files, ARROWS) == violations("zoo.store", files, ARROWS) == []


def test_relative_imports_are_resolved():
    assert imported_names("from ..errors import E", "zoo.nfn.train") >= {"zoo.errors", "zoo.errors.E"}
    assert imported_names("from . import layers", "zoo.nfn.train") >= {"zoo.nfn.layers"}
    assert imported_names("from .layers import A", "zoo.nfn", is_package=True) >= {"zoo.nfn.layers"}


def test_writing_to_the_hub_is_found_in_any_form():
    assert hub_writes("api.create_commit(x)") == {"create_commit"}
    assert hub_writes("from huggingface_hub import upload_folder as u") == {"upload_folder"}
    assert hub_writes("dataset.push_to_hub('x')") == {"push_to_hub"}
    assert hub_writes("api.dataset_info('x')") == set()
