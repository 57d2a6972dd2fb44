"""The prose of the service names tasks, agents and rows, and keeps "who" and "nobody" for people."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.source_tree import Module, modules

FOR_PEOPLE = re.compile(r"\b(who|whom|whoever|whose|nobody|somebody|everybody|anew)\b", re.IGNORECASE)
LIMIT_PER_1000_WORDS = 1.0
ABOUT_PEOPLE = ("Who may do what.", "who did what")
"""Texts in which these words are about people, so that they are not counted."""


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of comments, docstrings, and strings of more than three words."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    in_formatted: set[ast.AST] = set()
    for node in ast.walk(module.tree):  # from the outside in
        text = ""
        match node:
            case ast.JoinedStr(values=values):
                in_formatted |= {*values}
                text = " ".join(part.value for part in values if isinstance(part, ast.Constant))
            case ast.Constant(value=str(value)) if node not in in_formatted:
                text = value
        if len(text.split()) > 3:
            yield node.lineno, text


def words_for_people(text: str) -> list[str]:
    for exception in ABOUT_PEOPLE:
        text = text.replace(exception, "")
    return FOR_PEOPLE.findall(text)


def test_words_for_people_are_rare_in_the_prose_of_the_service() -> None:
    """If this fails: name the noun, such as the task, the agent or the row."""
    words, found = 0, []
    for module in modules("service"):
        for line, text in prose(module):
            words += len(text.split())
            found += [f"{module.path}:{line} {word}" for word in words_for_people(text)]
    assert len(found) <= words / 1000 * LIMIT_PER_1000_WORDS, "\n".join(found)


def test_words_for_people_are_found_in_comments_docstrings_and_messages() -> None:
    lines = '"""Who asks for it?"""', 'x = f"the row of {x} whose owner is gone"  # nobody waits', 'y = "who"'
    text = "\n".join(lines)
    module = Module("m.py", text)
    found = [(line, word) for line, one in prose(module) for word in words_for_people(one)]
    assert sorted(found) == [(1, "Who"), (2, "nobody"), (2, "whose")]
