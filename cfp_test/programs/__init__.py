"""Step functions of many kinds: ``*_step()`` gives ``(step, arguments[, options])``."""
