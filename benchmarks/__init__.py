"""Programs that measure side by side, and what reads a compiled program."""
