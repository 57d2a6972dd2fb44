"""The answers of the service: one Struct for each, used by the server, the SDK and the command line.

The server encodes these types, `openapi.yaml` is generated from them, and the SDK hands them to its users.
Values that answers show unchanged live here too, as plain Structs, and the service's core imports them from
here. An answer that adds to such a value derives from it and from `Answered`.
"""
