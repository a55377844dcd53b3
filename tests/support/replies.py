"""What environments say to turns, as tests write it."""


def by(role, *texts):
    """Messages of a role's, as a reply has them; None, which ends an episode, as it is."""
    return None if texts == (None,) else [{"role": role, "content": text} for text in texts]


def text(reply):
    """Of a reply's messages; None where it ends the episode."""
    return None if reply.answer is None else "\n".join(message["content"] for message in reply.answer)
