"""Generate, keep, publish and read zoos of small trained transformers.

The verbs of the command line under the same names; each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.builder import build as build
    from zoo.config import SweepConfig as SweepConfig
    from zoo.config import load_config as load_config
    from zoo.dataset import open_zoo as open_zoo
    from zoo.errors import ZooError as ZooError
    from zoo.evaluation import evaluate as evaluate
    from zoo.evaluation import rerun as rerun
    from zoo.hub import publish as publish
    from zoo.nfn.benchmark import benchmark as benchmark
    from zoo.nfn.predict import predict as predict
    from zoo.nfn.train import train as train
    from zoo.release import import_release as import_release
    from zoo.repair import repair_sweep as repair_sweep
    from zoo.selection import select as select
    from zoo.status import sweep_status as sweep_status
    from zoo.sweep import generate as generate
    from zoo.verification import verify as verify

__version__ = "0.1.0"

_MODULES = {
    "SweepConfig": "zoo.config",
    "ZooError": "zoo.errors",
    "benchmark": "zoo.nfn.benchmark",
    "build": "zoo.builder",
    "evaluate": "zoo.evaluation",
    "generate": "zoo.sweep",
    "import_release": "zoo.release",
    "load_config": "zoo.config",
    "open_zoo": "zoo.dataset",
    "predict": "zoo.nfn.predict",
    "publish": "zoo.hub",
    "repair_sweep": "zoo.repair",
    "rerun": "zoo.evaluation",
    "select": "zoo.selection",
    "sweep_status": "zoo.status",
    "train": "zoo.nfn.train",
    "verify": "zoo.verification",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
