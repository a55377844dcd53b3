"""Example tasks and environments, each in a module that you can copy and change.

The rest of the package imports no example. A run imports an example because its settings name it.

    maze          Questions, an environment and rewards by turn in one module.
    calculator    A small environment with and without tool calls, and a reward for using it.
    wordle        An environment with one tool.
    retrieval     An environment that searches documents, and a reward by turn.
    textarena     An agent around another library's games.
    dream         An environment that a language model simulates.
    experience    Notes that are appended to an environment's replies.
    kolmogorov    Questions with a partial reward.
    grids         Questions, and hindsight that relabels wrong answers.
    text          Questions from plain text.
"""
