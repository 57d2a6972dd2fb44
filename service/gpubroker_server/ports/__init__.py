"""The doors to the world as Protocols, one file per door."""
