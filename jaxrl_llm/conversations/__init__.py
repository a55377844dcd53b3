"""Who answers the policy: environments and their workers, agents, tools, tool calls, the OpenAI format."""
