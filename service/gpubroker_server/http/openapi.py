"""The OpenAPI document: FastAPI derives most of it from the routes, and this module adds the rest."""

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
    """Return True if `form` is a Struct, including a generic Struct with its parameter, such as
    `Page[Lease]`."""
    kind = get_origin(form) or form
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def reference_to(form: Any) -> dict[str, Any]:
    [reference], _ = _schemas_of([form])
    return _named_by_items(reference)


def _schemas_of(forms: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return a reference to the schema of each form, and all schemas by name."""
    return msgspec.json.schema_components(forms, schema_hook=_plain_schema, ref_template=REFERENCE)


def _named_by_items(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas with lists named by their items: msgspec calls a `Page[Lease]` Page_Lease_, and the
    document calls it LeasePage."""
    text = msgspec.json.encode(schemas).decode()
    named: dict[str, Any] = msgspec.json.decode(_LISTS.sub(lambda list: list[2] + _ENDINGS[list[1]], text))
    return named


def _plain_schema(kind: type) -> dict[str, Any]:
    if issubclass(kind, Time):
        return {"type": "string", "format": "date-time", "examples": ["2026-11-21T10:02:11.412Z"]}
    raise NotImplementedError(kind)


def _wire_schemas(forms: Iterable[Any]) -> dict[str, Any]:
    """Return the schemas of the answers. A schema lists the values of a state only if the state is a
    SettledState: clients must accept unknown values of all others."""
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
    """Declare fields with a default as required, and drop the default. The default serves the code that makes
    the value: an answer always has the field."""
    fields = schema.get("properties", {})
    always = [name for name, field in fields.items() if "default" in field]
    for name in always:
        del fields[name]["default"]
    if always:
        required = {*schema.get("required", ()), *always}
        schema["required"] = [name for name in fields if name in required]


def _states_in(kind: type[KnownState]) -> dict[str, Any]:
    values = [state.value for state in kind if state.value != "unknown"]
    if issubclass(kind, SettledState):
        return {"type": "string", "enum": values}
    return {"description": f"{', '.join(values)}.", "type": "string"}


def _with_states(schema: Any, states: Mapping[str, dict[str, Any]]) -> Any:
    """Return the schema with each reference to a state replaced by the schema of the state."""
    if isinstance(schema, list):
        return [_with_states(item, states) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (state := states.get(schema.get("$ref", ""))) is not None:
        return {**state, **{name: value for name, value in schema.items() if name != "$ref"}}
    return {name: _with_states(value, states) for name, value in schema.items()}


def complete(app: FastAPI, forms: Iterable[Any]) -> dict[str, Any]:
    """Return the whole document, which is built once per app. `forms` are the types of the answers."""
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
        if shared := answers.keys() & schemas.keys():
            raise TypeError(f"answers and bodies have types of the same name: {', '.join(sorted(shared))}")
        document["components"]["schemas"] = dict(sorted((schemas | answers).items()))
        app.openapi_schema = document
    return app.openapi_schema


def _polish(operation: dict[str, Any]) -> None:
    """Correct what FastAPI derives of an operation. The first line of the docstring becomes the summary. A
    parameter may be left out, but it is not null. One of several scopes is enough, which OpenAPI expresses as
    one requirement per scope."""
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
    """Writes text of several lines as a block, and writes equal values out instead of referring to the
    first."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # the signature is yaml's
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def openapi_yaml(document: dict[str, Any]) -> str:
    """Return the document as the text of `openapi.yaml`."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
