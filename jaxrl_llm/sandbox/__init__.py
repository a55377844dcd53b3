"""Sandbox for untrusted programs: processes that run the code, their limits, and tests of programs."""
