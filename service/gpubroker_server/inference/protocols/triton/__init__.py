"""What Triton's HTTP and gRPC protocols share: operations, errors, merged answers, health checks."""
