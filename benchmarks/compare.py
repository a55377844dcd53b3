"""Compare two result files of the same benchmark: ``python -m benchmarks.compare OLD.json NEW.json [--tolerance 0.1]``

The command prints the old value, the new value and their ratio for each figure. The exit status is 1 if a figure got
worse by more than the tolerance or is gone, and 2 if the files cannot be compared.

Owns: the rule for a worse figure. Does not know: the measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results


def worse_by(old: results.Figure, new: results.Figure) -> float:
    """Return how much worse the new value is, as a share of the old one.

    The share is negative for a better value, and 0 for a figure without a direction.
    """
    if old.better == "" or old.value == 0:
        return 0.0
    change = new.value / old.value - 1
    return change if old.better == "less" else -change


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance",
        type=results.share,
        default=0.1,
        help="share by which a figure may be worse",
    )
    options = parser.parse_args(arguments)
    try:
        old_record, old = results.read(options.old)
        new_record, new = results.read(options.new)
    except ValueError as error:
        parser.error(str(error))
    if old_record["benchmark"] != new_record["benchmark"]:
        parser.error(
            f"{options.old} has figures of {old_record['benchmark']}, {options.new} of {new_record['benchmark']}: "
            "compare files of the same benchmark"
        )

    table = Table("figure", "unit")
    for column in ("old", "new", "ratio", ""):
        table.add_column(column, justify="right")
    failed = 0
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new:
            failed += name not in new
            side = "only old" if name in old else "only new"
            table.add_row(name, "", f"{old[name].value:.4g}" if name in old else "", "", "", side)
            continue
        a, b = old[name], new[name]
        worse = worse_by(a, b)
        failed += worse > options.tolerance
        verdict = "worse" if worse > options.tolerance else "better" if -worse > options.tolerance else ""
        ratio = f"{b.value / a.value:.3f}" if a.value else ""
        table.add_row(name, a.unit, f"{a.value:.4g}", f"{b.value:.4g}", ratio, verdict)
    console = Console(width=120)
    for record, side in ((old_record, "old"), (new_record, "new")):
        console.print(f"{side}  {record['date']}  commit {record['commit'] or 'unknown'}  {record['hardware']}")
    console.print(table)
    if old_record["hardware"] != new_record["hardware"]:
        console.print("the hardware differs: only shares and ratios carry over")
    console.print(f"{failed} worse by more than {options.tolerance:.0%}, or gone")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
