"""Pages about the codes of problems, to which the `type` of a problem leads."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import Response
from gpubroker.wire.problems import ProblemPage

from gpubroker_server.http.problems import CATALOGUE, PAGES, Problem
from gpubroker_server.http.routing import Resource, answer

resource = Resource("operations")

_INSTALLED: Final = Path(__file__).parent / "errors.md"
_CHECKOUT: Final = Path(__file__).parents[4] / "docs" / "errors.md"
_SECTION: Final = re.compile(r"^## (?P<code>\S+)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@resource.route(f"GET {PAGES}/{{code}}", "problems_get", None, ProblemPage, "not-found")
async def get_problem_page(code: str) -> Response:
    """Read what a code of problems means, and what to do. Needs no token."""
    kind = CATALOGUE.get(code)
    if kind is None:
        raise Problem("not-found", f'there is no code "{code[:100]}"; docs/errors.md lists all')
    return answer(ProblemPage(code, kind.status, kind.title, kind.retryable, _texts()[code]))


@cache
def _texts() -> Mapping[str, str]:
    """Return the sections of docs/errors.md, which is a part of the distribution, by code."""
    page = (_INSTALLED if _INSTALLED.exists() else _CHECKOUT).read_text(encoding="utf-8")
    return {found["code"]: found["text"].strip() for found in _SECTION.finditer(page)}
