"""Measuring: compiles and times parts of programs, and stores their records."""
