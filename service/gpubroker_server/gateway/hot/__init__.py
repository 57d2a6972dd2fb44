"""The routes on which the service's throughput depends: submit, batch, wait, result, and calls of workers.

These routes bypass FastAPI's dependency machinery. A benchmark with 32 connections shows the difference: a
route that FastAPI validates answers 6,700 requests/s, and a route that validates the raw bytes once answers
9,600 (decision 4). All other routes are ordinary FastAPI, because they are not called often enough to matter.
"""
