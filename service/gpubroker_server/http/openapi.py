"""The OpenAPI document: what FastAPI derives from the routes, and what it cannot know."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, get_origin

import msgspec
import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from gpubroker.wire.answered import KnownState, SettledState, Time
from gpubroker.wire.problems import ProblemDocument

_DESCRIPTION = """\
One HTTP service in front of the GPUs you own: a durable queue, one GPU-memory ledger, and an explanation for
every decision.

Sizes in `_mb` are MiB, durations `_seconds`, times RFC 3339 in UTC. Errors are `application/problem+json`
with a stable `code`. The API only ever grows: accept fields and values that you do not know.
"""
_TAGS = [
    {"name": "tasks", "description": "Submit work and fetch what came of it."},
    {"name": "arrays", "description": "One function or command for many items."},
    {"name": "worker sets", "description": "Workers that are kept running and called."},
    {
        "name": "objects",
        "description": "Bytes that are uploaded once, for tasks and inferences that name them.",
    },
    {"name": "models", "description": "Models of inference servers, and inferences."},
    {"name": "leases", "description": "GPU memory for processes that the broker does not start."},
    {"name": "events", "description": "The log of everything that changed."},
    {"name": "cluster", "description": "Devices, nodes and totals."},
    {"name": "administration", "description": "Who may do what."},
    {"name": "operations", "description": "For operators of the service."},
]
REFERENCE = "#/components/schemas/{name}"
_ENDINGS = {"Page": "Page", "Listed": "List", "Overview": "List"}
_LISTS = re.compile(r"\b(Page|Listed|Overview)[_\[](\w+?)[_\]](?=\")")


def is_wire_form(form: Any) -> bool:
    """True for a Struct of `gpubroker.wire`, also for one of certain items, such as `Page[Lease]`."""
    kind = get_origin(form) or form
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def reference_to(form: Any) -> dict[str, Any]:
    [reference], _ = _schemas_of([form])
    return _named_by_items(reference)


def _schemas_of(forms: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return a reference to each form, and by name the schemas of all."""
    return msgspec.json.schema_components(forms, schema_hook=_plain_schema, ref_template=REFERENCE)


def _named_by_items(schemas: dict[str, Any]) -> dict[str, Any]:
    """Name lists by what they have: msgspec calls a `Page[Lease]` Page_Lease_, and the document LeasePage."""
    text = msgspec.json.encode(schemas).decode()
    named: dict[str, Any] = msgspec.json.decode(_LISTS.sub(lambda list: list[2] + _ENDINGS[list[1]], text))
    return named


def _plain_schema(kind: type) -> dict[str, Any]:
    if issubclass(kind, Time):
        return {"type": "string", "format": "date-time", "examples": ["2026-11-21T10:02:11.412Z"]}
    raise NotImplementedError(kind)


def _wire_schemas(forms: Iterable[Any]) -> dict[str, Any]:
    """Return the schemas of the answers. States stay open, unless they are settled: clients must accept
    unknown ones."""
    _, schemas = _schemas_of(forms)
    states = {
        state.__name__: _states_in(state)
        for state in (*KnownState.__subclasses__(), *SettledState.__subclasses__())
    }
    named = {
        REFERENCE.format(name=name): states[name]
        for name in schemas.keys() & states.keys()
        if schemas.pop(name)
    }
    for schema in schemas.values():
        _require_what_is_always_written(schema)
    return _named_by_items(_with_states(schemas, named))


def _require_what_is_always_written(schema: dict[str, Any]) -> None:
    """A default is for the code that makes the value: an answer has the field in any case."""
    fields = schema.get("properties", {})
    always = [name for name, field in fields.items() if "default" in field]
    for name in always:
        del fields[name]["default"]
    if always:
        required = {*schema.get("required", ()), *always}
        schema["required"] = [name for name in fields if name in required]


def _states_in(kind: type[KnownState]) -> dict[str, Any]:
    known = [state.value for state in kind if state.value != "unknown"]
    if issubclass(kind, SettledState):
        return {"type": "string", "enum": known}
    return {"description": f"{', '.join(known)}.", "type": "string"}


def _with_states(schema: Any, states: Mapping[str, dict[str, Any]]) -> Any:
    """Write states where they are referred to."""
    if isinstance(schema, list):
        return [_with_states(item, states) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (state := states.get(schema.get("$ref", ""))) is not None:
        return {**state, **{name: value for name, value in schema.items() if name != "$ref"}}
    return {name: _with_states(value, states) for name, value in schema.items()}


def complete(app: FastAPI, forms: Iterable[Any]) -> dict[str, Any]:
    """Return the whole document; `forms`: the types of the answers. It is built once per app."""
    if app.openapi_schema is None:
        document = get_openapi(
            title="gpubroker",
            version=version("gpubroker-server"),
            description=_DESCRIPTION,
            routes=app.routes,
            tags=_TAGS,
            license_info={"name": "MIT", "identifier": "MIT"},
            servers=[{"url": "http://127.0.0.1:8470", "description": "Where it listens by default."}],
        )
        for operations in document["paths"].values():
            for operation in operations.values():
                _polish(operation)
        schemas = document["components"]["schemas"]
        answers = _wire_schemas([*forms, ProblemDocument])
        if twice := answers.keys() & schemas.keys():
            raise TypeError(f"answers and bodies have types of the same name: {', '.join(sorted(twice))}")
        document["components"]["schemas"] = dict(sorted((schemas | answers).items()))
        app.openapi_schema = document
    return app.openapi_schema


def _polish(operation: dict[str, Any]) -> None:
    """Make the docstring's first line the summary. A parameter may be left out, but not null. Of several
    scopes any will do, which takes a requirement for each."""
    summary, _, rest = operation.pop("description").partition("\n\n")
    operation["summary"] = summary.rstrip(".")
    if rest:
        operation["description"] = rest
    if needed := operation.get("security"):
        operation["security"] = [
            {"token": [scope]} for requirement in needed for scope in requirement["token"]
        ]
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        choices = [choice for choice in schema.pop("anyOf", ()) if choice.get("type") != "null"]
        if len(choices) == 1:
            schema.update(choices[0])
        elif choices:
            schema["anyOf"] = choices
        schema.pop("description", None)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and no references to earlier values."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # the signature is yaml's
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def openapi_yaml(document: dict[str, Any]) -> str:
    """The document as `openapi.yaml` holds it."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
