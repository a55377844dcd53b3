"""Planning: memory, link traffic, time and cost of compiled programs on chips that need not be present."""
