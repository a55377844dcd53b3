"""Report: ``python -m jaxrl_llm.report --workdir=DIR`` writes DIR/report.html again, the run on one page.

Owns: the command. Does not know: what is on the page (reports.html).
"""

from absl import flags

from jaxrl_llm.reports import html
from jaxrl_llm.runtime import cli


def main() -> None:
    with cli.writing(WORKDIR.value):
        print(html.write_report(WORKDIR.value))


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run; the report is written into it.", required=True)
    cli.run(main)
