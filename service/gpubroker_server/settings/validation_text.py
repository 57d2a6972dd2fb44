"""Turns the faults that pydantic finds into messages for people who write YAML or JSON."""

from typing import Any

from pydantic_core import ErrorDetails


def text_of(found: ErrorDetails) -> str:
    """Return a message that says what the value must be, without the value itself."""
    bounds = found.get("ctx", {})
    match found["type"]:
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return "must be a whole number"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
        case "string_type":
            return "must be text"
        case "list_type" | "tuple_type":
            return "must be a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "must be an object"
        case "greater_than":
            return f"must be more than {_number(bounds['gt'])}"
        case "greater_than_equal":
            return f"must be at least {_number(bounds['ge'])}"
        case "less_than":
            return f"must be less than {_number(bounds['lt'])}"
        case "less_than_equal":
            return f"must be at most {_number(bounds['le'])}"
        case "too_short" | "string_too_short":
            return f"must have at least {_counted(bounds['min_length'], found['input'])}"
        case "too_long" | "string_too_long":
            return f"must have at most {_counted(bounds['max_length'], found['input'])}"
    return found["msg"].removeprefix("Value error, ").replace("Input should ", "must ")


def _number(bound: float) -> str:
    return f"{bound:.0f}" if bound == int(bound) else f"{bound:g}"


def _counted(bound: int, value: Any) -> str:
    unit = "character" if isinstance(value, str) else "item"
    return f"{bound} {unit}{'' if bound == 1 else 's'}; it {f'has {len(value)}' if value else 'is empty'}"
