"""The answers of the service: one Struct for each, used by the server, the SDK and the command line.

The server encodes these types, `openapi.yaml` is generated from them, and the SDK returns them to its users.
Values that answers show unchanged are here too, as plain Structs, and the service's core imports them from
here. An answer that adds fields to such a value derives from it and from `Answered`.
"""
