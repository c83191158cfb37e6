"""Random training steps under random shardings, compared with one device."""
