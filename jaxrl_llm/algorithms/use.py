"""Names that users' files import from here. The functions are in ``settings.use`` and ``algorithms.facts``."""

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.settings.use import use

__all__ = ["needs", "use"]
