"""Hook of MkDocs: the pages outside of docs are pages of the site too, and links to them lead there.

The pages of the repository link to each other by file paths, which work in any viewer. The root of the site is the
folder docs. This hook adds the files ``OUTSIDE`` to the site and changes every link to the place on the site.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "studies/replay_study.md", "studies/log.md")


def outside_files() -> list[str]:
    """Return the paths, from the top of the repository, of the files that are added to the site."""
    pictures = sorted((REPOSITORY / "studies").glob("*.svg"))
    return [*OUTSIDE, *(path.relative_to(REPOSITORY).as_posix() for path in pictures)]


def on_files(files, config):
    for path in outside_files():
        files.append(File.generated(config, place_on_site(path), abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = path_in_repository(page.file.src_uri)

    def moved(link):
        target, mark, anchor = link[3].partition("#")
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        is_page = files.get_file_from_path(place_on_site(path)) is not None
        if not is_page and (REPOSITORY / path).is_file():
            return link[2]  # A file of the repository that is not a page of the site: its name stays.
        relative = posixpath.relpath(place_on_site(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}[{link[2]}]({relative}{mark}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", moved, markdown)


def place_on_site(path: str) -> str:
    """Return the path on the site of a path in the repository. ``README.md`` is a page beside the site's index."""
    if path == "README.md":
        return "readme.md"
    return path.removeprefix("docs/")


def path_in_repository(path: str) -> str:
    """Return the path in the repository of a page of the site."""
    if path == "readme.md":
        return "README.md"
    return path if path in OUTSIDE else f"docs/{path}"
