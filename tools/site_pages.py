"""The site: the pages of docs/, with CONTRIBUTING.md, CHANGELOG.md, the configurations and the notebooks.

``python tools/site_pages.py`` writes all pages to build/pages and builds build/site, which opens from disk. Links
between these files are written as they hold in the repository, and turned here into those of the site; TeX between
dollars becomes MathML.
"""

import argparse
import ast
import itertools
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "configs": "configs.md"}
LINK = re.compile(r"(?<=\]\()([^():#\s]+)(?=[)#])")
INDENTED = re.compile(r"(?:^    \S.*\n?)+", re.MULTILINE)
BLOCK_TEX = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
TEX = re.compile(r"(?<![\\$])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")


def main() -> None:
    """Write the pages and build the site of them."""
    parser = argparse.ArgumentParser(description="Build the site of this repository's pages.")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="the folder of pages/ and site/")
    out = parser.parse_args().out
    write_pages(out / "pages")
    shutil.copy(ROOT / "mkdocs.yml", out)
    program = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(out / "mkdocs.yml")]
    sys.exit(subprocess.run(program, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode)


def write_pages(folder: Path) -> None:
    """Write all pages, and the files that they show, in place of those that are there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    pages |= {page: (ROOT / name).read_text() for name, page in MOVED.items() if name.endswith(".md")}
    pages |= {"configs.md": configurations()}
    pages |= {f"notebooks/{path.stem}.md": notebook(path) for path in NOTEBOOKS}
    (folder / "notebooks").mkdir()
    for page, text in pages.items():
        (folder / page).write_text(page_of_the_site(text, page))


def page_of_the_site(markdown: str, place: str) -> str:
    """Turn links that hold in the repository into those that hold here, and TeX into MathML; code is left alone."""
    source = next((name for name, moved in MOVED.items() if moved == place), f"docs/{place}")
    if place.startswith("notebooks/"):
        source = place

    def prose(text: str) -> str:
        linked = LINK.sub(lambda link: turned(link[1], source, place), text)
        return outside(CODE, linked, formulas)

    return outside(FENCE, markdown, prose)


def outside(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """``change`` applied to the parts of a text between the matches of a pattern."""
    kept = [0, *(end for match in pattern.finditer(text) for end in match.span()), len(text)]
    parts = [text[begin:end] for begin, end in itertools.pairwise(kept)]
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def turned(link: str, source: str, place: str) -> str:
    """A link from ``source`` of the repository as one from ``place`` of the site; what is not there stays."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif target.startswith("notebooks/"):
        target = str(Path(target).with_suffix(".md"))
    elif target in MOVED:
        target = MOVED[target]
    else:
        return link
    return posixpath.relpath(target, posixpath.dirname(place) or ".")


def configurations() -> str:
    """A section for each file of configs/: what it says of itself, and the file."""
    sections = []
    for path in sorted((ROOT / "configs").glob("[a-z]*.py")):
        code = path.read_text()
        words = ast.get_docstring(ast.parse(code)) or ""
        rest = code.split('"""', 2)[2].strip()
        folded = "\n".join(f"    {line}".rstrip() for line in ["```python", *rest.splitlines(), "```"])
        sections.append(f'## {path.stem}\n\n{spoken(words)}\n\n??? "configs/{path.name}"\n\n{folded}\n')
    about = "One file per run; each says its command, its hardware and what to expect."
    return "\n".join([f"# Configurations\n\n{about}\n", *sections])


def spoken(docstring: str) -> str:
    """A docstring as Markdown: what stands four columns in is a command."""
    words = docstring.replace("``", "`")
    return INDENTED.sub(lambda block: f"```bash\n{textwrap.dedent(block[0]).strip()}\n```\n", words)


def notebook(path: Path) -> str:
    """Texts, code, and what the code has shown; pictures stand in the page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def formulas(text: str) -> str:
    """TeX between dollars as MathML, which browsers draw without a script."""
    text = BLOCK_TEX.sub(lambda found: convert(found[1].strip(), display="block"), text)
    return TEX.sub(lambda found: convert(found[1]), text)


def shown(output: dict[str, Any]) -> str:
    """One output of a cell."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the cell shows](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"


if __name__ == "__main__":
    main()
