"""Results of the items of arrays, as rows."""
