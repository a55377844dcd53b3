"""Example tasks and environments, each in a module that you can copy and change.

The rest of the package imports no example: a run finds them by the names in its settings.

    maze          questions, an environment and rewards by turn in one module
    calculator    a small environment with and without tool calls, and a reward for using it
    wordle        an environment with one tool
    retrieval     an environment that searches documents, and a reward by turn
    textarena     an agent around another library's games
    dream         an environment that a language model simulates
    experience    notes that are appended to an environment's replies
    kolmogorov    questions with a partial reward
    grids         questions, and hindsight that relabels wrong answers
    text          questions from plain text
"""
