"""What a choice should take: times that are computed, not measured."""
