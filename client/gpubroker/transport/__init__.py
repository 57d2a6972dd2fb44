"""Find the service, send a request, retry, decode the answer."""
