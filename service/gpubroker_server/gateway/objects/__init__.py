"""Objects, which are bytes that are uploaded once and named by id."""
