"""A stand-in for the program `ray`, which notes the options of `ray start` and stays until it is ended."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ADDRESS = "127.0.0.1:6379"


def install(folder: Path, version: str = "2.60.0", behaviour: str = "") -> Path:
    """Make a `ray` and a `program` in this directory, as in a virtual environment, and return the program.

    `behaviour` is `fails` for a Ray that does not start, or `fails once`.
    """
    folder.mkdir(exist_ok=True)
    for name in ("ray", "program"):
        script = folder / name
        script.write_text(
            f"#!/bin/sh\nexec {sys.executable} -m {__name__} {name} {version} '{behaviour}' \"$@\"\n"
        )
        script.chmod(0o755)
    return folder / "program"


def started(folder: Path) -> list[Mapping[str, str]]:
    """Return the options and a part of the environment of each node that was started."""
    return [json.loads(line) for line in (folder / "started").read_text().splitlines()]


def main(name: str, version: str, behaviour: str, *words: str) -> None:
    folder = Path(os.environ["STAND_IN"])
    if name == "program":
        _run_program(folder, *words)
    elif words == ("--version",):
        print(f"ray, version {version}")
    else:
        _start(folder, behaviour, *words)


def _start(folder: Path, behaviour: str, *words: str) -> None:
    options = dict(word.partition("=")[::2] for word in words[1:])
    seen = {
        name: os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "RAY_AUTH_MODE", "RAY_ADDRESS")
    }
    with (folder / "started").open("a") as told:
        told.write(json.dumps({**options, **seen}) + "\n")
    if behaviour == "fails" or (behaviour == "fails once" and len(started(folder)) == 1):
        sys.exit("no port is free")
    place = Path(options["--temp-dir"])
    place.mkdir()
    address = options.get("--address") or f"{options['--node-ip-address']}:{options['--port']}"
    (place / "ray_current_cluster").write_text(address)
    (folder / f"node-{os.getpid()}").touch()
    signal.pause()


def _run_program(folder: Path, what: str = "", *_: str) -> None:
    (folder / "driver").write_text(f"{os.getpid()} {os.environ['RAY_ADDRESS']}")
    if what == "stays":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            time.sleep(0.01)
    sys.exit(3 if what == "fails" else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
