"""Objects: bytes that are uploaded once and referred to by id."""
