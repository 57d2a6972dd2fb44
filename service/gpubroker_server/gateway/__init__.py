"""The gateway serves the HTTP API. It parses, admits and stores requests and shows the state of the cluster,
but it plans nothing and changes the state of no stored task."""
