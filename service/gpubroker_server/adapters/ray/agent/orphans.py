"""Runs of which processes are there, though nobody who is left knows of them."""

import os
import re

from gpubroker.runtime.messages import RunKey
from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK

from gpubroker_server.adapters.ray.agent.run_records import RunFiles
from gpubroker_server.adapters.ray.processes import lineage, marks_of, opened_by, process_table

_KEY = re.compile(r"(.+?):(\d+)(?::(\d+))?")


def strays_of(instance: str, node: str, files: RunFiles) -> set[RunKey]:
    """Those of all runs of this broker on this node that have a process here, whoever knows of them.

    By the marks in its environment, or by a log of this node's that it holds open, as the process does that
    the run began in. Another node may be on the same machine. Looks at every process: a moment's work.
    """
    table = process_table()
    found: set[RunKey] = set()
    for pid in table.keys() - lineage(os.getpid(), table):
        marks = marks_of(pid)
        if (marks.get(INSTANCE_MARK), marks.get(NODE_MARK)) == (instance, node):
            found |= {key for key in [_key_of(marks.get(RUN_MARK, ""))] if key is not None}
        found |= {key for key in map(files.key_of_log, opened_by(pid)) if key is not None}
    return found


def _key_of(mark: str) -> RunKey | None:
    read = _KEY.fullmatch(mark)
    return None if read is None else RunKey(read[1], int(read[2]), int(read[3] or 0))
