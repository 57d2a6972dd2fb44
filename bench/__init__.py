"""The benchmarks behind the performance table: `python -m bench NAME`. They are never part of a test run."""
