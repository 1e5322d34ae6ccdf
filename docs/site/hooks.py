"""Hooks of MkDocs: pages that come from elsewhere in the project, links to files without a page, formulas as MathML."""

from __future__ import annotations

import html
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import options  # noqa: E402 - needs the path

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "recipes/index.md",
    "recipes/papers.md": "recipes/papers.md",
    "recipes/papers-real.md": "recipes/papers-real.md",
    **{f"recipes/{path.stem}.md": f"recipes/{path.stem}.md" for path in (ROOT / "recipes").glob("*.yaml")},
    **{f"bench/{path.name}": f"bench/{path.name}" for path in (ROOT / "bench").glob("*.md")},
    **{
        f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.ipynb")
    },
}
"""Files of the project outside of docs/ that have a page: path -> path of the page."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """Adds pages that the navigation does not name to its last section."""
    named = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    rest = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    if rest:
        config["nav"].append({"Further": rest})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made or come from elsewhere."""
    files.append(File.generated(config, "options.md", content=options.page()))
    for source, page in PAGES.items():
        path = ROOT / source
        text = notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        if path.with_suffix(".yaml").is_file():
            settings = path.with_suffix(".yaml").read_text(encoding="utf-8")
            text += f"\n## The file\n\n`{path.with_suffix('.yaml').relative_to(ROOT)}`:\n\n```yaml\n{settings}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links of the project's folders into links of the site; a file without a page becomes its name."""
    sources = {made: source for source, made in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def place(target: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))

    def here(path: str) -> str:
        target = PAGES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        path = place(target)
        if path in PAGES or path.startswith("docs/") or not (ROOT / path).exists():
            return f"[{text}]({here(path)}{anchor})"
        return text

    def image(match: re.Match[str]) -> str:
        return match[0] if ":" in match[2] else f"![{match[1]}]({here(place(match[2]))})"

    return _IMAGE.sub(image, _LINK.sub(link, markdown))


def on_page_content(html_text: str, **_: Any) -> str:
    """Writes formulas as MathML, which browsers show without scripts."""

    def formula(match: re.Match[str]) -> str:
        if match[1] == "div":
            return f'<div class="formula">{convert(html.unescape(match[3]), display="block")}</div>'
        return convert(html.unescape(match[3]), display="inline")

    return _FORMULA.sub(formula, html_text)


def notebook(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what the code printed and drew."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f'<img alt="Output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.append(f"This page is the notebook `{path.relative_to(ROOT)}`.")
    return "\n\n".join(parts) + "\n"
