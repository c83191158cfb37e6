"""Planning on a Ray cluster: builders on any node, a runner with the devices.

All that is scheduled here is scheduled by Ray: tasks that compile, an actor with the
devices, and one with the records (:mod:`cfp.cluster.ray.actors`). Ray is the extra
``cfp[cluster]``: :mod:`cfp.cluster.ray.planning` can be imported without it, and says
so if it is missing.
"""
