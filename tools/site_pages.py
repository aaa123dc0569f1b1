"""What the site shows beside docs/, a hook of mkdocs: CONTRIBUTING.md, CHANGELOG.md, the configurations, the notebooks.

Links between these files are written as they hold in the repository, and turned here into those of the site.
"""

import ast
import itertools
import json
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "configs": "configs.md"}
LINK = re.compile(r"(?<=\]\()([^():#\s]+)(?=[)#])")
INDENTED = re.compile(r"(?:^    \S.*\n?)+", re.MULTILINE)
TEX = re.compile(r"(\$\$?)(\S.*?)\1", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> None:
    """The notebooks stand in the navigation, all that there are."""
    config["nav"].append({"Notebooks": [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]})


def on_files(files: Files, config: Any) -> None:
    """Add the pages that are made of other files."""
    pages = {page: (ROOT / name).read_text() for name, page in MOVED.items() if name.endswith(".md")}
    pages |= {"configs.md": configurations()}
    pages |= {f"notebooks/{path.stem}.md": notebook(path) for path in NOTEBOOKS}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that hold in the repository into those that hold here; code is left alone."""
    place = page.file.src_uri
    source = next((name for name, moved in MOVED.items() if moved == place), f"docs/{place}")
    if place.startswith("notebooks/"):
        source = place
    kept = [0, *(end for fence in FENCE.finditer(markdown) for end in fence.span()), len(markdown)]
    parts = [markdown[begin:end] for begin, end in itertools.pairwise(kept)]
    return "".join(
        part if number % 2 else LINK.sub(lambda link: turned(link[1], source, place), part)
        for number, part in enumerate(parts)
    )


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
        parts.append(formulas(text) if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def formulas(text: str) -> str:
    """TeX between dollars as MathML, which browsers draw without a script."""
    return TEX.sub(lambda found: convert(found[2], display="block" if found[1] == "$$" else "inline"), text)


def shown(output: dict[str, Any]) -> str:
    """One output of a cell."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the cell shows](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"
