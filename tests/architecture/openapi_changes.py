"""Breaking changes between two OpenAPI documents: what a client of the old one could not do or read any more.

    python -m tests.architecture.openapi_changes OLD.yaml NEW.yaml

Names of schemas do not count, because no client sees them. A request may only get wider and an answer only
narrower, except that answers may have more properties than before.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Schema = Mapping[str, Any]
_PREFIX = "#/components/schemas/"
_BOUNDS = {
    "minimum": 1,
    "exclusiveMinimum": 1,
    "minLength": 1,
    "minItems": 1,
    "maximum": -1,
    "exclusiveMaximum": -1,
    "maxLength": -1,
    "maxItems": -1,
}
"""Bounds, and the direction in which a request gets narrower."""


def breaking_changes(old: Schema, new: Schema) -> list[str]:
    return list(_Comparison(old, new).of_paths())


def renamed_schemas(old: Schema, new: Schema) -> list[str]:
    """List the schemas that the new document has no more, by the names that the old one gave them."""
    names = (set(each["components"]["schemas"]) for each in (old, new))
    before, after = names
    return [f"- {name}" for name in sorted(before - after)] + [f"+ {name}" for name in sorted(after - before)]


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._under_way: set[tuple[str, str, bool]] = set()

    def of_paths(self) -> Iterator[str]:
        for path, operations in self._old["paths"].items():
            for method, old in operations.items():
                new = self._new["paths"].get(path, {}).get(method)
                where = f"{method.upper()} {path}"
                if new is None:
                    yield f"{where}: removed"
                else:
                    yield from self._of_operation(where, old, new)

    def _of_operation(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        if old["operationId"] != new["operationId"]:
            yield f"{where}: operationId {old['operationId']} is now {new['operationId']}"
        yield from self._of_parameters(where, old, new)
        if "requestBody" in old:
            if "requestBody" not in new:
                yield f"{where}: takes no body any more"
            else:
                for kind, given in old["requestBody"]["content"].items():
                    now = new["requestBody"]["content"].get(kind)
                    if now is None:
                        yield f"{where}: takes no {kind} any more"
                    else:
                        yield from self._of_schemas(f"{where} body", given["schema"], now["schema"], True)
        if new.get("requestBody", {}).get("required") and not old.get("requestBody", {}).get("required"):
            yield f"{where}: the body is required now"
        for status, response in old["responses"].items():
            now = new["responses"].get(status)
            if now is None and int(status if status.isdigit() else 500) < 400:
                yield f"{where}: no answer {status} any more"
            for kind, given in response.get("content", {}).items():
                if now is not None and kind not in now.get("content", {}):
                    yield f"{where} {status}: no {kind} any more"
                elif now is not None and "schema" in given:
                    yield from self._of_schemas(
                        f"{where} {status}", given["schema"], now["content"][kind]["schema"], False
                    )

    def _of_parameters(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        before, after = (
            {(one["in"], one["name"]): one for one in each.get("parameters", ())} for each in (old, new)
        )
        for key, given in before.items():
            if key not in after:
                yield f"{where}: parameter {key[1]} removed"
            else:
                yield from self._of_schemas(f"{where} ?{key[1]}", given["schema"], after[key]["schema"], True)
        for key, now in after.items():
            if now.get("required") and not before.get(key, {}).get("required"):
                yield f"{where}: parameter {key[1]} is required now"

    def _of_schemas(self, where: str, old: Schema, new: Schema, is_request: bool) -> Iterator[str]:
        named = (old.get("$ref", ""), new.get("$ref", ""), is_request)
        if named[0] and named in self._under_way:
            return
        self._under_way.add(named)
        try:
            before, after = _choices(self._old, old), _choices(self._new, new)
            yield from self._of_types(where, before, after, is_request)
            for kind, given in before.items():
                if kind in after:
                    yield from self._of_one(where, given, after[kind], is_request)
        finally:
            self._under_way.discard(named)

    def _of_types(
        self, where: str, before: Mapping[str, Schema], after: Mapping[str, Schema], is_request: bool
    ) -> Iterator[str]:
        """A request may have more types than before, an answer fewer; a number is more than an integer."""
        narrow, wide = (set(before), set(after)) if is_request else (set(after), set(before))
        if "any" in wide:
            return
        lost = {kind for kind in narrow - wide if not (kind == "integer" and "number" in wide)}
        if lost:
            yield f"{where}: types {', '.join(sorted(before))} are now {', '.join(sorted(after))}"

    def _of_one(self, where: str, old: Schema, new: Schema, is_request: bool) -> Iterator[str]:
        if is_request:
            yield from _narrowed(where, old, new)
        elif "enum" in new and "enum" in old and set(new["enum"]) - set(old["enum"]):
            yield f"{where}: values are new: {sorted(set(new['enum']) - set(old['enum']))}"
        elif "enum" in old and "enum" not in new and "const" not in new:
            yield f"{where}: any value now"
        before, after = old.get("properties", {}), new.get("properties", {})
        for name, given in before.items():
            if name not in after:
                yield f"{where}/{name}: removed"
            else:
                yield from self._of_schemas(f"{where}/{name}", given, after[name], is_request)
        required, now = set(old.get("required", ())), set(new.get("required", ()))
        if is_request and now - required:
            yield f"{where}: required now: {', '.join(sorted(now - required))}"
        if not is_request and required - now:
            yield f"{where}: not always there any more: {', '.join(sorted(required - now))}"
        for inner in ("items", "additionalProperties"):
            if isinstance(old.get(inner), Mapping) and isinstance(new.get(inner), Mapping):
                yield from self._of_schemas(f"{where}/{inner}", old[inner], new[inner], is_request)


def _narrowed(where: str, old: Schema, new: Schema) -> Iterator[str]:
    if "enum" in new and ("enum" not in old or set(old["enum"]) - set(new["enum"])):
        yield f"{where}: values are gone"
    if new.get("pattern") not in (None, old.get("pattern")):
        yield f"{where}: pattern {new['pattern']}"
    for bound, sign in _BOUNDS.items():
        if bound in new and (bound not in old or (new[bound] - old[bound]) * sign > 0):
            yield f"{where}: {bound} {old.get(bound)} is now {new[bound]}"


def _choices(document: Schema, schema: Schema) -> dict[str, Schema]:
    """Return the types that a value of the schema may have. Several objects become one of all properties."""
    if "$ref" in schema:
        return _choices(document, document["components"]["schemas"][schema["$ref"].removeprefix(_PREFIX)])
    several = schema.get("anyOf") or schema.get("oneOf")
    if several is None:
        kinds = schema.get("type", _kind_of_values(schema))
        return dict.fromkeys([kinds] if isinstance(kinds, str) else kinds, schema)
    found: dict[str, Schema] = {}
    for each in several:
        for kind, choice in _choices(document, each).items():
            found[kind] = _either(found[kind], choice) if kind in found else choice
    return found


def _kind_of_values(schema: Schema) -> str:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not values:
        return "object" if "properties" in schema else "any"
    return {bool: "boolean", int: "integer", str: "string"}.get(type(values[0]), "any")


def _either(one: Schema, other: Schema) -> Schema:
    if "enum" in one and "enum" in other:
        return {**one, "enum": [*one["enum"], *other["enum"]]}
    if "properties" not in one and "properties" not in other:
        return one if "enum" not in one else other
    required = set(one.get("required", ())) & set(other.get("required", ()))
    properties = {**other.get("properties", {}), **one.get("properties", {})}
    return {**one, "properties": properties, "required": sorted(required)}


def main() -> int:
    old, new = (yaml.load(Path(path).read_text(), yaml.CSafeLoader) for path in sys.argv[1:3])
    print(*renamed_schemas(old, new), sep="\n")
    found = breaking_changes(old, new)
    print(*found, f"{len(found)} breaking changes", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
