"""A server of completions: requests that come at any time share the sampler's slots."""
