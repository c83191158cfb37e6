"""Whole programs, compiled and timed in turn: the fastest that fits is the plan.

:mod:`cfp.race.race` tells the story; :mod:`cfp.race.admission` has the rules.
"""
