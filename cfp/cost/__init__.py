"""What a choice should take: time and memory that are computed, not measured."""
