"""The race: compiles whole programs, times them in turn; the fastest is the plan."""
