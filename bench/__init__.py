"""The benchmarks behind the performance table: `uv run python -m bench NAME`. Never part of a test run."""
