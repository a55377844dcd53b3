"""Replies of environments to turns, in the form that tests write."""


def by(role, *texts):
    """Return the messages of a role as a reply has them. None, which ends an episode, stays None."""
    return None if texts == (None,) else [{"role": role, "content": text} for text in texts]


def text(reply):
    """Return the text of a reply's messages; None if the reply ends the episode."""
    return None if reply.answer is None else "\n".join(message["content"] for message in reply.answer)
