"""Report: ``python -m jaxrl_llm.report --workdir=DIR`` writes DIR/report.html again, the run on one page.

Owns: the command. Does not know: the content of the page (reports.html).
"""

import os
import pathlib

from absl import flags

from jaxrl_llm.reports import html
from jaxrl_llm.runtime import cli

FLAGS = flags.FLAGS


def report(workdir: str | os.PathLike) -> pathlib.Path:
    """Write ``workdir/report.html`` from the files of the run and return its path.

    Raises:
        ConfigError: metrics.jsonl is missing or empty, or a file of the run cannot be read.
        DiskError: the disk is full or cannot be written.
    """
    with cli.writing(workdir):
        return html.write_report(workdir)


def main() -> None:
    """Run the command with the values of its flags."""
    print(report(FLAGS.workdir))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string(
        "workdir",
        None,
        "Directory of a run; the report is written into it.",
        required=True,
    )


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
