"""Measuring: compiles and times programs and parts of them; stores their records."""
