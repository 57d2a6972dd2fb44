"""The comparison of two OpenAPI documents finds what would break a client, and nothing else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.architecture.openapi_changes import breaking_changes, renamed_schemas

DOCUMENT: dict[str, Any] = {
    "paths": {
        "/things": {
            "post": {
                "operationId": "things_make",
                "parameters": [{"in": "query", "name": "limit", "schema": {"type": "integer", "minimum": 1}}],
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Make"}}}
                },
                "responses": {
                    "200": {
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}
                    }
                },
            }
        }
    },
    "components": {
        "schemas": {
            "Make": {
                "type": "object",
                "properties": {"size": {"type": "number"}, "kind": {"enum": ["a", "b"], "type": "string"}},
                "required": ["size"],
            },
            "Thing": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}},
                },
                "required": ["id", "at"],
            },
        }
    },
}
Change = Callable[[Any, Any, Any], object]
BREAKING: dict[str, Change] = {
    "a removed path": lambda document, _made, _thing: document["paths"].clear(),
    "a removed parameter": lambda document, _made, _thing: _post(document)["parameters"].clear(),
    "a narrower parameter": lambda document, _made, _thing: _post(document)["parameters"][0]["schema"].update(
        minimum=2
    ),
    "a new required field": lambda _document, made, _thing: made["required"].append("kind"),
    "a removed field": lambda _document, made, _thing: made["properties"].pop("kind"),
    "a narrower type of a field": lambda _document, made, _thing: made["properties"].update(
        size={"type": "integer"}
    ),
    "a value that is refused now": lambda _document, made, _thing: made["properties"]["kind"]["enum"].pop(),
    "a removed property": lambda _document, _made, thing: thing["properties"].pop("id"),
    "a property that may be left out": lambda _document, _made, thing: thing["required"].remove("at"),
    "a property that may be null": lambda _document, _made, thing: thing["properties"].update(
        id=thing["properties"]["at"]
    ),
    "a removed property of an item": lambda document, _made, thing: thing["properties"]["parts"].update(
        items={"type": "object", "properties": {"id": {"type": "string"}}}
    ),
}
HARMLESS: dict[str, Change] = {
    "a new path": lambda document, _made, _thing: document["paths"].update({"/more": {}}),
    "a wider field": lambda _document, made, _thing: made["properties"].update(
        size={"anyOf": [{"type": "number"}, {"type": "null"}]}
    ),
    "a new optional field": lambda _document, made, _thing: made["properties"].update(
        more={"type": "string"}
    ),
    "a new property": lambda _document, _made, thing: thing["properties"].update(more={"type": "string"}),
    "a property that is never null": lambda _document, _made, thing: thing["properties"].update(
        at={"type": "string"}
    ),
}


def _post(document: Any) -> Any:
    return document["paths"]["/things"]["post"]


def _changed(change: Change) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    schemas = document["components"]["schemas"]
    change(document, schemas["Make"], schemas["Thing"])
    return document


@pytest.mark.parametrize("name", BREAKING)
def test_a_breaking_change_is_found(name: str) -> None:
    assert breaking_changes(DOCUMENT, _changed(BREAKING[name])), name


@pytest.mark.parametrize("name", HARMLESS)
def test_growth_is_no_breaking_change(name: str) -> None:
    assert breaking_changes(DOCUMENT, _changed(HARMLESS[name])) == [], name


def test_a_renamed_schema_breaks_nothing_and_is_listed() -> None:
    new = copy.deepcopy(DOCUMENT)
    schemas = new["components"]["schemas"]
    schemas["Made"] = schemas.pop("Make")
    _post(new)["requestBody"]["content"]["application/json"]["schema"]["$ref"] = "#/components/schemas/Made"
    assert breaking_changes(DOCUMENT, new) == []
    assert renamed_schemas(DOCUMENT, new) == ["- Make", "+ Made"]
