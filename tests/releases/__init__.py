"""The wheels of the last release, for tests of the upgrade from it to this tree."""
