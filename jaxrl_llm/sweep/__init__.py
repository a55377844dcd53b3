"""Many runs, one table and one page."""
