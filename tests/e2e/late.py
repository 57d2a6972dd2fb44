"""A module that can only be imported once somebody has made the file that GATE names."""

import os
import time
from pathlib import Path

while not Path(os.environ["GATE"]).exists():
    time.sleep(0.01)


def begin() -> str:
    return "begun"
