"""Search: which choices are worth measuring, and which of the measured to take."""
