"""Whole programs, compiled and timed in turn: the fastest that fits is the plan.

The rule of who races is :mod:`cfp.race.enough`; :mod:`cfp.race.race` tells the story.
"""
