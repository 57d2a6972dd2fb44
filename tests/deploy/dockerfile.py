"""A Dockerfile as its instructions, by stage."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field


class Instruction(Struct, frozen=True):
    name: str
    words: str

    @property
    def from_stage(self) -> str | None:
        """Of a COPY from another stage or image."""
        found = re.match(r"--from=(\S+)", self.words)
        return found[1] if found else None

    @property
    def sources(self) -> Sequence[str]:
        """Of a COPY."""
        return [word for word in self.words.split() if not word.startswith("--")][:-1]

    @property
    def command(self) -> Sequence[str]:
        """Of one in exec form."""
        found: list[str] = json.loads(self.words[self.words.index("[") :])
        return found


class Stage(Struct, frozen=True):
    name: str
    base: str
    own: list[Instruction] = field(default_factory=list)


def stages(file: Path) -> Mapping[str, Stage]:
    found: dict[str, Stage] = {}
    latest: Stage | None = None
    for instruction in instructions(file.read_text(encoding="utf-8")):
        if instruction.name == "FROM":
            base, _, name = instruction.words.partition(" AS ")
            latest = found[name] = Stage(name, base)
        elif latest is not None:
            latest.own.append(instruction)
    return found


def instructions(text: str) -> Iterator[Instruction]:
    """Without comments, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            yield Instruction(name, words.strip())


def with_bases(found: Mapping[str, Stage], name: str) -> Sequence[Instruction]:
    """All instructions of a stage, those of the stages that it begins with first."""
    stage = found[name]
    before = with_bases(found, stage.base) if stage.base in found else ()
    return [*before, *stage.own]


def variables(found: Sequence[Instruction]) -> dict[str, str]:
    pairs = (pair for one in found if one.name == "ENV" for pair in one.words.split())
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
