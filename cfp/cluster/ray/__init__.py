"""Planning on a Ray cluster: builders on any node, a runner with the devices.

All that is scheduled here is scheduled by Ray: tasks that compile
(:mod:`cfp.cluster.ray.planning`), an actor with the devices, and one with the records
(:mod:`cfp.cluster.ray.planning`). Ray is the extra ``cfp[cluster]``: nothing but
:mod:`cfp.cluster.ray.planning` is imported before it is known to be there.
"""
