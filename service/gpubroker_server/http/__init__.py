"""The checks that every request passes: host, token, size limits, validation, problems."""
