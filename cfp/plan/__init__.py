"""Plans: their fields, files, compiled steps, and descriptions of a program."""
