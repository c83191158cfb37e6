"""Search: selects strategies to measure, and the fastest combination that fits."""
