"""The C compiler for what tests build: the machine's, or the one that `make` installs where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path


def compile_library(source: Path, library: Path, *options: str) -> None:
    """Raises CalledProcessError with what the compiler said."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    compiler = [found] if found else [sys.executable, "-m", "ziglang", "cc"]
    strict = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compiler, *strict, *options, "-o", library, source, "-ldl"], check=True)
