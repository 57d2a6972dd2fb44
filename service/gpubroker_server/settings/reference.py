"""What `config.example.yaml` says about each setting: the source of the schema and of the reference page."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from gpubroker_server.settings.loading import settings_model
from gpubroker_server.settings.struct_models import WRITTEN_AS

_INSTALLED: Final = Path(__file__).parent / "config.example.yaml"
_CHECKOUT: Final = Path(__file__).parents[3] / "config.example.yaml"
_LINE: Final = re.compile(r'^(?P<indent> *)(?P<name>"[^"]+"|[\w.]+):(?P<rest>.*)$')
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TOP: Final = "service"
"""The title of the settings that are in no section."""


class DocumentedSetting(NamedTuple):
    path: tuple[str, ...]
    default: Any
    text: str
    """What the comment says, in one line."""
    is_section: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)


def example_text() -> str:
    """Return `config.example.yaml`, which is a part of the distribution."""
    return (_INSTALLED if _INSTALLED.exists() else _CHECKOUT).read_text(encoding="utf-8")


@cache
def documented_settings() -> tuple[DocumentedSetting, ...]:
    """Return all settings and sections in the order of the file. Entries of lists and maps are part of the
    setting that holds them."""
    text, schema = example_text(), settings_model().model_json_schema()
    defaults = yaml.safe_load(text)
    return tuple(
        DocumentedSetting(
            path, _at(defaults, path), comment, is_section="properties" in _resolved(schema, described)
        )
        for path, comment in _comments(text.splitlines())
        if (described := _described(schema, path)) is not None
    )


def settings_schema() -> Mapping[str, Any]:
    """Return the JSON Schema of a configuration file."""
    schema = deepcopy(settings_model().model_json_schema())
    schema["title"] = "gpubroker"
    for section in (schema, *schema["$defs"].values()):
        for name, place in section.get("properties", {}).items():
            section["properties"][name] = _with_units(name, place)
    for setting in documented_settings():
        described = _described(schema, setting.path)
        assert described is not None  # every documented setting is described
        described |= {"description": setting.text} if setting.text else {}
        if not setting.is_section:
            described["default"] = setting.default
    return schema


def settings_page() -> str:
    """Return the reference page of all settings, as Markdown."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `gpubroker config reference` from config.example.yaml. -->",
        "",
        "The configuration file is YAML; `gpubroker config check` checks it, and `gpubroker config show",
        "--origin` shows which values hold and where they come from. Each setting can also be given as",
        "`--set NAME=VALUE`, or as an environment variable: `ray.spares` is `GPUBROKER_RAY__SPARES`.",
        "[How to configure](../how-to/configure.md).",
        "",
    ]
    documented = documented_settings()
    sections = [setting for setting in documented if setting.is_section]
    for section in (None, *sections):
        path = () if section is None else section.path
        rows = [row for row in documented if row.path[:-1] == path and not row.is_section]
        if not rows:
            continue
        lines += [f"## {_TOP if section is None else section.name}", ""]
        if section is not None and section.text:
            lines += [_cell(section.text), ""]
        lines += ["| Setting | Default | Meaning |", "|---|---|---|"]
        lines += [f"| `{row.path[-1]}` | {_default(row.default)} | {_cell(row.text)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _with_units(name: str, place: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the schema that describes a setting, which may be a text such as `16GiB` if the
    setting is a number with a unit."""
    if not name.endswith(tuple(WRITTEN_AS)):
        return place
    if place.get("type") in ("integer", "number"):
        bounds = {key: place[key] for key in _BOUNDS if key in place}
        rest = {key: value for key, value in place.items() if key not in (*bounds, "type")}
        return {**rest, "anyOf": [{"type": place["type"], **bounds}, {"type": "string"}]}
    if isinstance(place.get("additionalProperties"), dict):
        return {**place, "additionalProperties": _with_units(name, place["additionalProperties"])}
    if "anyOf" in place:
        return {**place, "anyOf": [*place["anyOf"], {"type": "string"}]}
    return place


def _comments(lines: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path and the comment of each line with a setting. Lines of comment alone continue it."""
    open_path: list[tuple[int, str]] = []
    found: tuple[str, ...] | None = None
    words: list[str] = []
    for line in lines:
        matched = _LINE.match(line)
        if matched is not None:
            if found is not None:
                yield found, " ".join(words)
            indent = len(matched["indent"])
            open_path = [(depth, name) for depth, name in open_path if depth < indent]
            open_path.append((indent, matched["name"].strip('"')))
            found = tuple(name for _, name in open_path)
            words = [comment] if (comment := _comment_of(matched["rest"])) else []
        elif line.lstrip().startswith("#") and line.startswith(" ") and found is not None:
            words.append(line.strip(" #"))
    if found is not None:
        yield found, " ".join(words)


def _comment_of(rest: str) -> str:
    """Return the comment after a value. A `#` that no space precedes belongs to the value."""
    _, mark, comment = rest.partition(" #")
    return comment.strip() if mark else ""


def _at(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _described(schema: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """Return the part of the schema that describes the setting at `path`; None for an entry of a map."""
    place = schema
    for name in path:
        properties = _resolved(schema, place).get("properties", {})
        if name not in properties:
            return None
        place = properties[name]
    return place


def _resolved(schema: Mapping[str, Any], place: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition to which a part of the schema refers, or the part itself."""
    for part in (place, *place.get("anyOf", ()), *place.get("allOf", ())):
        if "$ref" in part:
            resolved: Mapping[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return resolved
    return place


def _default(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return f"`{text.removesuffix(chr(10)).removesuffix('...').strip()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
