"""Programs that measure side by side, in one process, and print ratios."""
