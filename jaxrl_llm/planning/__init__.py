"""Planning: what compiled programs need of chips that are not there: memory, links, seconds, money."""
