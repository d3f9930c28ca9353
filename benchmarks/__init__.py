"""Programs that measure; so far what reads a compiled program, for the tests."""
