"""Attention kernels for specific devices, and attention over rows that are split over devices."""
