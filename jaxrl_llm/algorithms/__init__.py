"""The functions of methods: pure functions of arrays, with their settings as keywords."""
