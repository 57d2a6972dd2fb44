"""What every request passes: host, token, size limits, validation, problems."""
