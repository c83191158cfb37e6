"""Whole programs, compiled and timed in turn: the fastest that fits is the plan.

What races follows from :mod:`cfp.race.admission`; :mod:`cfp.race.race` tells the story.
"""
