"""The OpenAPI document: what FastAPI derives from the routes, and what it cannot know."""

from importlib.metadata import version
from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from gpubroker_server.gateway.http.problems import ProblemDocument

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
_REF = "#/components/schemas/{model}"


def complete(app: FastAPI) -> dict[str, Any]:
    """The whole document. Built once per app."""
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
        _add_problem_schema(document["components"]["schemas"])
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
        operation["security"] = [{"token": [scope]} for each in needed for scope in each["token"]]
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        choices = [choice for choice in schema.pop("anyOf", ()) if choice.get("type") != "null"]
        if len(choices) == 1:
            schema.update(choices[0])
        elif choices:
            schema["anyOf"] = choices
        schema.pop("description", None)


def _add_problem_schema(schemas: dict[str, Any]) -> None:
    problem = TypeAdapter(ProblemDocument).json_schema(mode="serialization", ref_template=_REF)
    schemas.update(problem.pop("$defs", {}))
    schemas["ProblemDocument"] = problem
    for name in sorted(schemas):
        schemas[name] = schemas.pop(name)


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
