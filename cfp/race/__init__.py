"""The race: compiles programs, times them in turn; the simplest of the fastest wins."""
