"""A package index of one small package on disk, so that environments are built without a network."""

import base64
import hashlib
import zipfile
from pathlib import Path

PACKAGE = "answerlib"
MODULE = '''"""A package that no environment has by itself."""
import sys

ANSWER = {answer}


def where():
    return [ANSWER, sys.prefix, list(sys.version_info[:2])]


def twice(x):
    return ANSWER * x


class Adder:
    def __init__(self, start):
        self.sum = start

    def add(self, number):
        self.sum += number
        return [self.sum, sys.prefix]
'''


def make_wheel(directory: Path, version: str = "1.0", answer: int = 42) -> Path:
    """Write a wheel of the package, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": MODULE.format(answer=answer),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_digest(text)},{len(text.encode())}\n" for name, text in files.items())
    wheel = directory / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return wheel


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
