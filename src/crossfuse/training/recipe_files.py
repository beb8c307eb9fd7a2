"""Recipes from YAML: by name or path, with one parent (`extends:`) and `key=value` changes on top."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from crossfuse.data.records import first_reason
from crossfuse.fusion import nearest
from crossfuse.training.recipe import EXCLUSIVE, SECTIONS, DataSource, Recipe, set_dotted, untag

# Fields that say nothing about the run, so that nobody asks where their value comes from.
UNTAGGED = ("description", "extends", "tags")
# Fields whose inner names other parts check: fusions their own fields, lists of data sets by number.
OPEN = ("fusion", "data", "validation")


def load_recipe(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML or JSON file, or a shipped one by its name, with `key=value` changes.

    Args:
        source: path, or a name such as "attanchor-tinyllava-1b", found from any folder.
        overrides: such as "learning_rate=2e-4", "lora.rank=8", "data.0.limit=100", "validation=null". A changed
            value loses its tag.

    Raises:
        ValueError: no such recipe, an unknown key at any level (with the nearest name), or a value that does not fit;
            one line that names the file.
    """
    path = find_recipe(source)
    values = _merged(path, ())
    try:
        for name in ("data", "validation"):
            if isinstance(values.get(name), str | dict):
                values[name] = [{"path": values[name]} if isinstance(values[name], str) else values[name]]
        for text in overrides:
            name, value = _parse_override(text)
            _check_name(name)
            set_dotted(values, name, value)
            untag(values, name)
        return _validated(values)
    except ValueError as error:
        raise ValueError(f"{path.name}: {first_reason(error)}") from error


def find_recipe(source: str | os.PathLike[str]) -> Path:
    """The file of a recipe that is given by path or by the name of a shipped one."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    name = str(source)
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    if path.suffix in (".yaml", ".yml", ".json") or path.parent != Path("."):
        raise ValueError(f"no such recipe: {name}; give a file, or one of: {', '.join(shipped)}")
    raise ValueError(f"no recipe is called {name!r}{nearest(name, shipped)}; shipped: {', '.join(shipped)}")


def shipped_recipes() -> dict[str, Path]:
    """Name and file of every recipe that comes with the package."""
    found = sorted(recipe_folder().glob("*.yaml"), key=lambda path: path.stem)
    # Settings of single scripts lie in the same folder; a recipe says what it is.
    return {path.stem: path for path in found if re.search(r"(?m)^description:", path.read_text(encoding="utf-8"))}


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, or at the top of the source tree."""
    installed = Path(str(files("crossfuse").joinpath("recipes")))
    if installed.is_dir():
        return installed
    return Path(str(files("crossfuse"))).parents[1] / "recipes"


def untagged_fields(path: str | os.PathLike[str]) -> list[str]:
    """Dotted names of the values that one file sets itself and whose origin its own `tags` do not tell."""
    values = _read(Path(path))
    tags = values.get("tags") or {}
    return [name for name in _leaves(values) if not any(_covers(tag, name) for tag in tags)]


def _merged(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The file's values over those of its parents."""
    path = path.resolve()
    if path in below:
        raise ValueError(f"{path.name}: `extends` runs in a circle: {' -> '.join(p.stem for p in (*below, path))}")
    values = _read(path)
    parent = values.pop("extends", None)
    try:
        _check_keys(values)
        if parent is None:
            return values
        if not isinstance(parent, str):
            raise ValueError(f"`extends` takes the name of one recipe; got {parent!r}")
        beside = path.parent / f"{parent}.yaml"
        base = _merged(beside if beside.is_file() else find_recipe(parent), (*below, path))
    except ValueError as error:
        if below or str(error).startswith(f"{path.name}:"):
            raise
        raise ValueError(f"{path.name}: {first_reason(error)}") from error
    return _over(base, values)


def _over(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections key by key, lists and all else whole. Another fusion replaces the parent's fields with its own."""
    merged = dict(base)
    for pair in EXCLUSIVE:
        if any(values.get(name) is not None for name in pair):
            for name in pair:
                merged.pop(name, None)
                _drop_tags(merged, name)
    for name, value in values.items():
        old = merged.get(name)
        if name == "fusion" and isinstance(value, dict) and value.get("name") not in (None, (old or {}).get("name")):
            old = None
        if name == "fusion" and old is None:
            _drop_tags(merged, name)
        if isinstance(old, dict) and isinstance(value, dict) and name != "tags":
            merged[name] = old | value
        elif name != "tags":
            merged[name] = value
    merged["tags"] = (merged.get("tags") or {}) | (values.get("tags") or {})
    return merged


def _drop_tags(values: dict[str, Any], name: str) -> None:
    values["tags"] = {key: tag for key, tag in (values.get("tags") or {}).items() if not _covers(name, key)}


def _covers(tag: str, name: str) -> bool:
    return name == tag or name.startswith(f"{tag}.")


def _leaves(values: Mapping[str, Any]) -> Iterable[str]:
    for name, value in values.items():
        if name in UNTAGGED:
            continue
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _check_keys(values: Mapping[str, Any]) -> None:
    """Refuse unknown keys of this very file: after merging nobody could tell where they came from."""
    sections = {section.title: section for section in SECTIONS if section is not DataSource}
    Recipe.refuse_unknown(values)
    for name, value in values.items():
        if name in sections and isinstance(value, dict):
            sections[name].refuse_unknown(value)
    known = {*Recipe.model_fields, *Recipe.field_names()}
    for tag in values.get("tags") or {}:
        if tag not in known and tag.partition(".")[0] not in OPEN:
            raise ValueError(f"`tags` names no field {tag!r}{nearest(str(tag), known)}")


def _check_name(name: str) -> None:
    """A clearer message than the section's own: `lora.rnk` is refused as it was typed."""
    first, _, rest = name.partition(".")
    known = [*Recipe.field_names(), *Recipe.model_fields]
    if name in known or first in OPEN:
        return
    if rest and first in Recipe.model_fields and not any(leaf.startswith(f"{first}.") for leaf in known):
        raise ValueError(f"{first!r} is no section of a recipe; {name!r} cannot be set")
    raise ValueError(f"a recipe has no field {name!r}{nearest(name, known)}")


def _parse_override(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ValueError(f"a change is written key=value, such as learning_rate=2e-4 or lora.rank=8; got {text!r}")
    try:
        return name.strip(), yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r}: the value is no YAML ({str(error).splitlines()[0]})") from error


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no recipe: it must be a mapping of fields to values")
    return values


def _validated(values: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({name: value for name, value in values.items() if value is not None})


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (1e-4 is one), and no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands twice{str(node.start_mark).strip()}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)
