"""For tools that look for a setup.py; all there is to say is in pyproject.toml."""

from setuptools import setup

setup()
