"""The common part of Triton's HTTP and gRPC protocols: operations, errors, merged answers, health checks."""
