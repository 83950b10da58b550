"""What a dataset says of itself: its card names the files of each config, its provenance how they were made."""

import json
from typing import Any

import yaml

from zoo.errors import DatasetError, one_line
from zoo.hub_folder import CARD, PROVENANCE
from zoo.reading import Source


def card_files(source: Source) -> dict[str, list[str]]:
    """Return config -> its files, of all configs that name any.

    Raises:
        DatasetError: there is no card, or it has no metadata.
    """
    try:
        metadata = yaml.safe_load(source.read_bytes(CARD).decode().split("---\n")[1])
    # PyYAML lets through what its own tables say of `!!bool abc`.
    except (OSError, LookupError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise DatasetError(
            f"{source.name}: {CARD}: not a readable dataset card ({one_line(error)}); see `zoo build`"
        ) from error
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    found = [(config, _files_of(config)) for config in (configs if isinstance(configs, list) else [])]
    return {config["config_name"]: files for config, files in found if files}


def _files_of(config: Any) -> list[str]:
    """Return the files that a config names; [] where it is none of a dataset of ours."""
    try:
        name, files = config["config_name"], [path for split in config["data_files"] for path in split["path"]]
    except (LookupError, TypeError):
        return []
    return files if all(isinstance(text, str) for text in (name, *files)) else []


def read_provenance(source: Source) -> dict[str, Any]:
    """Return the versions, engines, data and plans of a dataset, as its provenance.json has them.

    Raises:
        DatasetError: there is none, or it is not what a build writes.
    """
    where = f"{source.name}: {PROVENANCE}"
    try:
        content = json.loads(source.read_bytes(PROVENANCE))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not readable ({one_line(error)}), expected JSON; see `zoo verify`") from error
    for key in ("data", "plans"):
        if not isinstance(content, dict) or not isinstance(content.get(key), dict):
            raise DatasetError(f"{where}: {key}: found none, expected an object; see `zoo verify`")
    return content
