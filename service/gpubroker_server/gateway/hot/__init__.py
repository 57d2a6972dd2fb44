"""The routes on which the service's throughput depends: submit, batch, wait, result, and calls of workers.

They bypass FastAPI's dependency machinery, because a benchmark of each shows it: with 32 connections a
route that FastAPI validates answers 6,700 requests/s, the same body validated once from raw bytes 9,600
(decision 4). No other route is asked often enough for that to be felt, so every other route is ordinary
FastAPI.
"""
