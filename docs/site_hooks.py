"""Hooks of MkDocs: the pages beside mkdocs.yml, files of the repository that they link to, and formulas as MathML.

A page may link to any file of the repository by its relative path, as it does on a repository's web page; the files
are copied into the site, and Markdown files among them become pages. Formulas are converted at build time, so that the
site needs no script from elsewhere.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

#: Files outside of docs/ that have a place of their own in the site.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", ".github/CONTRIBUTING.md": "contributing.md"}

LINK = re.compile(r"\]\((?P<path>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, their pictures, and every file of the repository that a page links to."""
    waiting = [path for pattern in ("*.md", "images/*.png") for path in sorted(DOCS.glob(pattern))]
    waiting += [ROOT / name for name in PAGES if name != "README.md"]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [target for _, target in links(path, path.read_text(encoding="utf-8"))]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository to their copies in the site."""
    if page.file.abs_src_path is None:
        return markdown
    source = Path(page.file.abs_src_path)
    folder = PurePosixPath(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = linked_file(source, match["path"])
        if target is None:
            return match[0]
        return f"]({os.path.relpath(site_path(target), folder)}{match['anchor'] or ''})"

    # Every second part is a fenced block, which stays as it is.
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas from LaTeX to MathML, which browsers show without a script."""

    def replace(match: re.Match[str]) -> str:
        block = match["tag"] == "div"
        mathml = convert(html.unescape(match["tex"]).strip(), display="block" if block else "inline")
        return f'<div class="formula">{mathml}</div>' if block else mathml

    return FORMULA.sub(replace, content)


def links(source: Path, text: str) -> Iterator[tuple[str, Path]]:
    """Every link of a Markdown file to a file of the repository: as it is written, and the file."""
    for part in FENCE.split(text)[::2]:
        for match in LINK.finditer(part):
            target = linked_file(source, match["path"])
            if target is not None:
                yield match["path"], target


def linked_file(source: Path, path: str) -> Path | None:
    """The file of the repository that a link names, or None (an address, or no such file)."""
    target = (source.parent / path).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def site_path(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"repository/{name}"
