"""The data plane: requests of clients to models, over Triton's protocols. HTTP requests under /v2 use the
port of the API."""
