"""The benchmarks behind the performance table: `python -m bench NAME`. Never part of a test run."""
