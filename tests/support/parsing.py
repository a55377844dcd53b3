"""The config of a command line, by the parser that all commands share."""

import sys
import warnings

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.config import Config, freeze
from jaxrl_llm.runtime import cli


def config_of(*words: str, monkeypatch) -> Config:
    """Return the config from ``--config=FILE --config.a.b=value ...``. The process ends if they are refused."""
    known = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", known)
    monkeypatch.setattr(sys, "argv", ["command", *words])
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # ml_collections' name for the file of --config
    flags.DEFINE_string("workdir", None, "", flag_values=known)
    parsed = config_flags.DEFINE_config_file("config", flag_values=known)
    with cli.one_line_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of ml_collections
        cli._parse(sys.argv)
    return freeze(parsed.value)
