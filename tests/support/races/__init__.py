"""Finds races of device and host memory on a machine without a GPU; docs/decisions/ says how."""
