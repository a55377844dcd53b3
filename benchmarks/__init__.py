"""Measurements: a step against its peers and its physical floor (run), its parts (micro), one GPU (gpu), or what one
that is not here would have to do (roofline).

Nothing in jaxrl_llm imports this.
"""
