"""Make notebooks of the tutorials: their text and Python, with the outputs of a run.

    pip install -c constraints.txt -e '.[demo,train,notebooks]'
    python docs/make_notebooks.py

Commands for a shell stay text, and so does what the page says a block prints, because the notebook has the real output.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
PAGES = ("quickstart", "converting_encoders", "converting_decoders")

#: What a page says that the block above prints; marks for scripts; links to other pages.
PRINTED = re.compile(r"(?<=```\n)\n```text\n.*?^```$\n?", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)")

#: Printed lines that depend on the machine: logs with a date, the times of the trainers.
LOGS = re.compile(r"^(\[\d{4}-|\{'(train|eval)_).*\n", re.MULTILINE)


def notebook_of(page: str) -> nbformat.NotebookNode:
    """Return the notebook of a page, without outputs."""
    text = LINK.sub("](../", MARK.sub("", PRINTED.sub("", page)))
    text = text.replace("```bash\n", "```text\n")  # a cell would run the commands
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index}", {}
    return notebook


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in PAGES:
        notebook = notebook_of((DOCS / f"{name}.md").read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, resources={"metadata": {"path": folder}}, timeout=600).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.metadata = {}
                printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
                text = LOGS.sub("", printed)
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        path = DOCS / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
