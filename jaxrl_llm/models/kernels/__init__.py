"""Attention by kernels of the devices that have them."""
