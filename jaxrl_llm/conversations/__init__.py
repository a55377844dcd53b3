"""Conversation partners of the policy: environments and their workers, agents, tools, tool calls, the OpenAI format."""
