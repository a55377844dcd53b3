"""Strangers' programs: processes that run untrusted code, their limits, and tests of programs."""
