"""What to keep, where, and what to load: pure Python, no I/O, no clock, no torch. The simulator runs it too."""
