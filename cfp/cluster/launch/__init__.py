"""Starts a program as several processes, under what a site has for that.

:mod:`cfp.cluster.launch.scripts` writes what schedulers read; nothing in it runs. What
runs here, runs in :mod:`cfp.cluster.launch.local` and :mod:`cfp.cluster.launch.ray`.
"""
