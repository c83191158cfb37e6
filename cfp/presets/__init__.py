"""Presets: classic strategies; and roles of arguments and mesh axes."""
