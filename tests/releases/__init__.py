"""The wheels of the last release, for tests of the upgrade from it to this tree; and of a commit after it the
modules that read a log, which import nothing else of it."""
