"""The storage of large objects, which are found by their digest."""
