"""A folder on the PYTHONPATH of runs with a share of a GPU; Python imports its `sitecustomize` at start."""
